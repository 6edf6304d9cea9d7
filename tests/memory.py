"""How much memory a piece of Python needs, measured in a process of its own."""

import subprocess
import sys

PEAK = """
import pathlib, re, resource, sys

def peak():
    status = pathlib.Path("/proc/self/status")
    if status.exists():  # getrusage would count what this process was before it became Python
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
"""


def numbers_from(code, *arguments):
    """Run code that may call `peak()`, the most resident bytes so far; returns the integers it prints."""
    command = [sys.executable, "-c", PEAK + code, *map(str, arguments)]
    return [int(word) for word in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]
