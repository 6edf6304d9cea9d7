import nbformat
import pytest
from hypothesis import settings

from ddtree.cuda import Kernel
from deep import deepen
from tools import book, export, format, gpu, gpu_texts, lab, measure_book, run_tests, warm
from tools.gpu import with_texts


def notebook(*cells):
    return nbformat.v4.new_notebook(cells=list(cells), metadata=format.METADATA)


def code(source, **extra):
    return nbformat.v4.new_code_cell(source, **extra)


def run_tool(tool, monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", [tool.__name__, *map(str, arguments)])
    return tool.main()


MESSY = notebook(
    nbformat.v4.new_markdown_cell("# T  \n"),
    code(
        "x = 1 \nx\n", execution_count=7, metadata={"tags": ["parameters"], "papermill": {"duration": 1}},
        outputs=[
            nbformat.v4.new_output("stream", name="stdout", text="a"),
            nbformat.v4.new_output("stream", name="stdout", text="b"),
            nbformat.v4.new_output("execute_result", {"text/plain": "1"}, execution_count=7, metadata={"x": 1}),
        ],
    ),
    code(""),
)  # fmt: skip


def test_canonical_form_keeps_ids_tags_and_outputs_and_drops_the_rest():
    once = format.canonical(nbformat.writes(MESSY))
    assert format.canonical(once) == once
    result = nbformat.reads(once, as_version=4)
    title, cell = result.cells
    assert (title.id, cell.id) == (MESSY.cells[0].id, MESSY.cells[1].id)
    assert (title.source, cell.source) == ("# T", "x = 1\nx")
    assert cell.metadata == {"tags": ["parameters"]} and cell.execution_count == 1
    assert [output.output_type for output in cell.outputs] == ["stream", "execute_result"]
    assert cell.outputs[0].text == "ab" and cell.outputs[1].execution_count == 1 and cell.outputs[1].metadata == {}
    assert result.metadata == format.METADATA


def test_format_check_names_the_notebook_and_fix_mends_it(tmp_path, monkeypatch, capsys):
    path = tmp_path / "01_a.ipynb"
    path.write_text(nbformat.writes(MESSY))
    assert run_tool(format, monkeypatch, "--check", path) == 1
    assert f"{path}: not canonical" in capsys.readouterr().out
    assert run_tool(format, monkeypatch, "--fix", path) == 0
    assert run_tool(format, monkeypatch, "--check", path) == 0


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    monkeypatch.setattr(export, "ROOT", tmp_path)
    write(tmp_path, "01_one", "x = 1")
    return tmp_path


def write(project, name, source, directive=True, title="# One\n\n> First.", module=None):
    first = [code(f"#| default_exp {module or name.split('_', 1)[-1]}")] if directive else []
    cells = [nbformat.v4.new_markdown_cell(title), *first, code(f"#| export\n{source}")]
    nbformat.write(notebook(*cells), project / "notebooks" / f"{name}.ipynb")


def test_export_writes_modules_with_docstrings_and_check_accepts_them(project, monkeypatch):
    assert run_tool(export, monkeypatch) == 0
    text = (project / "ddtree" / "one.py").read_text()
    assert text.startswith('"""First."""') and "__all__ = ['x']" in text and "../notebooks/01_one.ipynb" in text
    assert '__version__ = "1.2.3"' in (project / "ddtree" / "__init__.py").read_text()
    assert run_tool(export, monkeypatch, "--check") == 0


@pytest.mark.parametrize("harm", ["edit", "orphan", "missing"])
def test_export_check_finds_drift(project, monkeypatch, capsys, harm):
    run_tool(export, monkeypatch)
    module = project / "ddtree" / "one.py"
    if harm == "edit":
        module.write_text(module.read_text().replace("x = 1", "x = 2"))
    elif harm == "missing":
        module.unlink()
    else:
        (project / "ddtree" / "two.py").write_text("")
    assert run_tool(export, monkeypatch, "--check") == 1
    assert ("two.py" if harm == "orphan" else "one.py") in capsys.readouterr().out


def test_export_deletes_modules_that_no_notebook_exports(project, monkeypatch):
    (project / "ddtree").mkdir()
    (project / "ddtree" / "gone.py").write_text("")
    run_tool(export, monkeypatch)
    assert not (project / "ddtree" / "gone.py").exists()


@pytest.mark.parametrize(
    ("name", "source", "options", "message"),
    [
        ("02_two", "from ddtree.three import y", {}, "imports three, which no earlier notebook exports"),
        ("02_two", "from ddtree.three import (\n    y,\n)", {}, "imports three, which no earlier notebook exports"),
        ("02_two_part", "y = 1", {"module": "two.part"}, "no notebook exports the face of two: NNx_NAME.ipynb"),
        ("02b_two", "from ddtree.three.part import y", {}, "imports three.part, which no earlier notebook exports"),
        ("two", "y = 1", {}, "NN_stem.ipynb"),
        ("02_two", "y = 1", {"directive": False}, "no '#| default_exp two'"),
        ("02_two", "y = 1", {"title": "# No docstring"}, "the module docstring"),
    ],
)
def test_export_refuses_notebooks_that_break_a_rule(project, monkeypatch, name, source, options, message):
    write(project, name, source, **options)
    with pytest.raises(SystemExit, match=message.replace("|", r"\|").replace(".", r"\.")):
        run_tool(export, monkeypatch)


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setattr(book, "BUILD", tmp_path / "build")
    path = tmp_path / "01_page.ipynb"
    parameters = code('profile: str = "small"', metadata={"tags": ["parameters"]})
    nbformat.write(notebook(nbformat.v4.new_markdown_cell("# P"), parameters, code("profile * 2")), path)
    return path


def test_book_stores_outputs_under_the_same_cell_ids(page, monkeypatch):
    before = nbformat.read(page, as_version=4)
    assert run_tool(book, monkeypatch, "--store", page) == 0
    after = nbformat.read(page, as_version=4)
    assert [cell.id for cell in before.cells] == [cell.id for cell in after.cells]
    assert after.cells[2].outputs[0].data["text/plain"] == "'smallsmall'"
    assert format.canonical(page.read_text()) == page.read_text()


def test_book_renders_html_and_passes_parameters(page, monkeypatch):
    assert run_tool(book, monkeypatch, "-p", "profile", "full", page) == 0
    assert "fullfull" in (book.BUILD / "01_page.html").read_text()
    assert (
        "outputs" not in nbformat.read(page, as_version=4).cells[2]
        or not nbformat.read(page, as_version=4).cells[2].outputs
    )


def test_book_refuses_an_unknown_parameter(page, monkeypatch):
    with pytest.raises(SystemExit, match="unknown parameter size; it has profile"):
        run_tool(book, monkeypatch, "-p", "size", "3", page)


@pytest.mark.parametrize(
    ("source", "seconds", "message"), [("1 / 0", 600, "1 / 0"), ("import time; time.sleep(30)", 2, "longer than 2 s")]
)
def test_book_shows_a_failing_or_slow_cell(page, monkeypatch, source, seconds, message):
    content = nbformat.read(page, as_version=4)
    content.cells.append(code(source))
    nbformat.write(content, page)
    with pytest.raises(SystemExit, match=message):
        run_tool(book, monkeypatch, "--cell-seconds", seconds, page)


def test_book_runs_the_others_when_a_notebook_fails(page, monkeypatch, capfd):
    wrong = page.with_name("02_wrong.ipynb")
    nbformat.write(notebook(code("1 / 0")), wrong)
    with pytest.raises(SystemExit, match=r"02_wrong\.ipynb: cell 0 failed"):
        run_tool(book, monkeypatch, "--jobs", 2, page, wrong)
    printed = capfd.readouterr()
    assert "02_wrong.ipynb: FAILED" in printed.out and "01_page.ipynb: " in printed.out
    assert (book.BUILD / "01_page.html").exists() and "WARNING" not in printed.err


def lesson(source, shows=True):
    outputs = [nbformat.v4.new_output("execute_result", {"text/plain": "1", "image/png": ""})] if shows else []
    return code(source, outputs=outputs)


def measured(*cells):
    parameters = code('profile: str = "small"', metadata={"tags": ["parameters"]})
    head = nbformat.v4.new_markdown_cell("# T\n\n> One."), code("#| default_exp a"), parameters
    page = notebook(*head, code("#| export\nimport a"), *cells)
    lessons = [cell for cell in measure_book.code_cells(page) if not cell.exported]
    return measure_book.measure(page, {word for cell in lessons for word in measure_book.words(cell.source)})


KERNEL = "#| export\n@kernel('E1')\ndef add_kernel(x):\n    pass"
LONG = "#| export\n" + "x = 1\n" * 50


@pytest.mark.parametrize(
    ("cells", "lines"),
    [
        ([code(KERNEL), lesson("add_kernel(1)"), lesson("\nassert_equal(1, 1)")], 1),
        ([code(KERNEL), code(LONG), lesson("assert 1")], 51),
        ([code(KERNEL), code(LONG)], measure_book.NEVER),
        ([code(KERNEL), lesson("try:\n    add_kernel()\nexcept ValueError as e:\n    e"), lesson("assert 1")], 4),
        ([lesson(KERNEL.replace("#| export\n", "")), lesson("try:\n    1\nexcept ValueError as e:\n    e")], 0),
        ([lesson(KERNEL.replace("#| export\n", "")), lesson("x = 2"), lesson("x")], measure_book.NEVER),
        ([code("#| export\ndef make():\n    @kernel()\n    def inner():\n        pass"), lesson("check_all()")], 0),
    ],
)
def test_lines_from_a_kernel_to_its_first_comparison_are_counted(cells, lines):
    assert measured(*cells).to_comparison == lines


def test_a_run_of_exported_code_ends_at_a_cell_that_runs_not_at_one_that_imports():
    assert measured(code(LONG), code(LONG), lesson("x")).export_run == 102
    assert measured(code(LONG), lesson("x"), code(LONG)).export_run == 51
    assert measured(code(LONG), lesson("import b"), code(LONG)).export_run == 102
    assert measured(code(LONG), lesson("x")).first_output == 52


def test_a_device_function_counts_as_run_when_the_code_of_a_lesson_cell_names_it():
    function = "#| export\n@device_function\ndef half(x):\n    return x"
    assert measured(code(function), lesson("run_function(half, 1)")).not_run == 0
    named_in_a_comment = measured(code(function), lesson("x  # half"))
    assert (named_in_a_comment.not_run, named_in_a_comment.where["not_run"]) == (1, "half")


def test_long_functions_are_found_and_those_over_40_lines_need_a_reason():
    def function(lines, reason):
        return code(f'#| export\ndef f():\n    """Does it{reason}."""\n' + "    x = 1\n" * (lines - 2))

    assert (measured(function(40, "")).unexplained, measured(function(41, "")).unexplained) == (0, 1)
    commented = code("#| export\ndef f():\n    # long because of its arguments\n" + "    x = 1\n" * 40)
    assert measured(commented).unexplained == 0
    page = measured(function(61, ", long because the steps share their state"))
    assert (page.function_lines, page.functions_over_60, page.unexplained) == (61, 1, 0)


def test_cells_prose_and_figures_are_counted():
    page = measured(lesson("x\n" * 7), lesson("x\n\n\nx"), nbformat.v4.new_markdown_cell("a\nb"))
    assert (page.cell_median, page.long_lessons, page.figures) == (2, 0.5, 2)
    assert page.prose_per_code == 4 / 11


@pytest.fixture
def ratchet(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_book, "BEHIND", tmp_path / "behind.json")
    monkeypatch.setattr(measure_book, "NOTEBOOKS", tmp_path)

    def write_page(lines, name="01_a"):
        nbformat.write(notebook(code("#| export\n" + "x = 1\n" * (lines - 1)), lesson("x")), tmp_path / f"{name}.ipynb")

    write_page(80)
    assert run_tool(measure_book, monkeypatch, "--update") == 0
    return write_page


def test_the_ratchet_starts_from_what_is_and_holds_it(ratchet, monkeypatch, capsys):
    assert run_tool(measure_book, monkeypatch, "--check") == 0
    assert measure_book.BEHIND.read_text() == '{\n  "01_a": {"export_run": 80, "first_output": 81}\n}\n'
    ratchet(81)
    for option in ("--check", "--update"):
        assert run_tool(measure_book, monkeypatch, option) == 1
        assert "worse: 01_a: export_run is 81, 80 are listed" in capsys.readouterr().out
    assert '"export_run": 80' in measure_book.BEHIND.read_text()


def test_a_new_page_must_keep_to_the_limits(ratchet, monkeypatch, capsys):
    ratchet(61, "02_b")
    assert run_tool(measure_book, monkeypatch, "--check") == 1
    assert "worse: 02_b: export_run is 61, the limit is 60" in capsys.readouterr().out


@pytest.mark.parametrize("lines", [70, 10])
def test_a_page_that_became_better_must_tighten_the_list(ratchet, monkeypatch, capsys, lines):
    ratchet(lines)
    assert run_tool(measure_book, monkeypatch, "--check") == 1
    assert "better: 01_a: export_run is" in capsys.readouterr().out
    assert run_tool(measure_book, monkeypatch, "--update") == 0
    assert run_tool(measure_book, monkeypatch, "--check") == 0
    assert ("01_a" in measure_book.BEHIND.read_text()) == (lines == 70)


def test_all_steps_run_and_one_that_fails_fails_the_whole(monkeypatch, capfd):
    monkeypatch.setattr(run_tests, "STATIC", {"lint": "-c print('lint-says')", "types": "-c import(sys)"})
    steps = {"tests": "-c print('1-passed');raise(SystemExit(3))", "book": "-c print('book-done')"}
    monkeypatch.setattr(run_tests, "long_steps", lambda jobs: steps)
    assert run_tool(run_tests, monkeypatch) == 1
    printed = capfd.readouterr().out
    assert [text in printed for text in ("lint-says", "SyntaxError", "1-passed", "book-done")] == [True] * 4
    assert printed.splitlines()[-1] == "FAILED: tests, types"


def test_when_every_step_passes_so_does_the_whole(monkeypatch, capfd):
    monkeypatch.setattr(run_tests, "STATIC", {"lint": "-c pass"})
    monkeypatch.setattr(run_tests, "long_steps", lambda jobs: {"tests": f"-c print('jobs:{jobs}')"})
    assert run_tool(run_tests, monkeypatch, "--jobs", "3") == 0
    printed = capfd.readouterr().out
    assert "jobs:3" in printed and printed.splitlines()[-1] == "everything passed"


def test_no_step_stops_a_cell_before_ten_minutes():
    assert float(run_tests.NBVAL.split("--nbval-cell-timeout ")[1].split()[0]) >= 600
    assert "--cell-seconds" not in " ".join(run_tests.long_steps(2).values())


def test_deep_runs_draw_ten_times_as_many_cases_anew_each_time():
    deep = deepen(settings(max_examples=25, derandomize=True, deadline=None))
    assert (deep.max_examples, deep.derandomize, deep.deadline) == (250, False, None)


def test_deep_runs_reach_every_generated_test():
    """The names of hypothesis that tests/conftest.py uses are still there."""
    tests = sorted((export.ROOT / "tests").glob("test_*.py"))
    generated = next(path for path in tests if "@given(" in path.read_text())
    module = __import__(generated.stem)
    functions = [value for value in vars(module).values() if hasattr(value, "hypothesis")]
    assert functions and all(isinstance(f._hypothesis_internal_use_settings, settings) for f in functions)


def test_warming_finds_the_kernels_of_the_main_way_each_once():
    kernels = warm.find_kernels()
    names = [kernel.name for kernel in kernels]
    assert all(isinstance(kernel, Kernel) for kernel in kernels) and len(set(map(id, kernels))) == len(kernels)
    assert {"build_trees", "merge_top_k", "layout_trees"} <= set(names)


def test_warming_needs_a_folder(monkeypatch):
    monkeypatch.setenv("DDTREE_CACHE", "")
    with pytest.raises(SystemExit, match="the folder that DDTREE_CACHE names"):
        run_tool(warm, monkeypatch)


def test_lab_trusts_the_notebooks_and_starts_jupyterlab_on_the_first(page, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(lab, "NOTEBOOKS", page.parent)
    started = []
    monkeypatch.setattr("os.execv", lambda program, command: started.append(command))
    run_tool(lab, monkeypatch, "--no-browser")
    assert lab.NotebookNotary().check_signature(nbformat.read(page, as_version=4))
    assert "trusted 1 notebooks" in capsys.readouterr().out
    assert started[0][1:3] == ["-m", "jupyterlab"] and "--no-browser" in started[0]
    assert started[0][-1].endswith("00_start_here.ipynb")


def test_sections_that_fail_are_recorded_and_the_next_still_runs(monkeypatch, tmp_path):
    written = []
    monkeypatch.setattr(gpu, "write_measurement", lambda out, command, results: written.append(dict(results)))
    sections = {"trees": lambda: {"equal": True}, "top-k": lambda: int("x"), "rows": lambda: gpu.ROOT / 1}
    sections["end"] = lambda: 4
    results = gpu.run_sections(sections, tmp_path / "x.json", "command", {"arch": "sm_90"})
    assert (results["arch"], results["trees"], results["end"]) == ("sm_90", {"equal": True}, 4)
    assert gpu.failures(results) == [
        "top-k: FAILED: ValueError: invalid literal for int() with base 10: 'x'",
        "rows: FAILED: TypeError: unsupported operand type(s) for /: 'PosixPath' and 'int'",
    ]
    assert [len(results) for results in written] == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("========= ERROR SUMMARY: 0 errors", True),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", True),
        ("========= ERROR SUMMARY: 3 errors", False),
        ("hazard detected\n========= RACECHECK SUMMARY: 0 hazards displayed", False),
        ("========= COMPUTE-SANITIZER\nkilled", False),
    ],
)
def test_a_report_of_compute_sanitizer_is_clean_only_with_its_summary(text, clean):
    assert gpu.is_clean(text) is clean


def test_texts_from_elsewhere_stand_in_for_kernels_by_name_and_only_for_a_while():
    from ddtree.build import build_trees_one_warp_kernel as replaced
    from ddtree.topk import merge_top_k_kernel as other

    before = replaced.ptx_to_run("sm_120")
    with with_texts({replaced.name: "text"}):
        assert replaced.ptx_to_run("sm_120") == "text" and other.ptx_to_run("sm_120").startswith("//")
    assert replaced.ptx_to_run("sm_120") == before


def test_a_text_of_another_version_gets_the_kernels_entry():
    assert gpu_texts.renamed("new", ".visible .entry ddtree_old(\nddtree_old_param_0") == (
        ".visible .entry ddtree_new(\nddtree_old_param_0"
    )
