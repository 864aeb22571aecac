"""The report page: its structure, and what a browser makes of it."""

import base64
import os
import re
import shutil
import sys
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from sortattn.bench.machine import this_machine
from sortattn.bench.paper import plot as paper_plot
from sortattn.bench.paper.run import PaperRow
from sortattn.cli import _parser, main
from sortattn.experiments.mqar import command as mqar
from sortattn.experiments.mqar import plot as mqar_plot
from sortattn.experiments.recall import command as recall
from sortattn.experiments.recall import plot as recall_plot
from sortattn.experiments.report.command import FOLDERS
from sortattn.experiments.report.page import Section, page
from sortattn.experiments.text import pareto
from sortattn.experiments.vision import results as vision
from sortattn.records import read, write

from .. import browser

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = {"recall-h200": recall.Row, "mqar-h200": mqar.Row, "h200-paper": PaperRow}
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Outline(HTMLParser):
    """Every tag with its attributes; complains about tags that are not closed in turn."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """The page of the committed results and of a file with accuracies of a grid."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "grid-accuracy.csv").write_text("kernel,G,error\nadd_bump,64,<b>&0.001\n")
    places = [str(RESULTS), str(folder / "grid-accuracy.csv")]
    assert main(["report", "--results", *places, "--out", str(folder)]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def outline(committed):
    return Outline(committed.read_text(encoding="utf-8"))


def test_the_page_is_well_formed_and_reads_on_phones_in_light_and_dark(committed, outline):
    text = committed.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    metas = outline.all("meta")
    assert {"charset": "utf-8"} in metas
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in metas
    assert {"name": "color-scheme", "content": "light dark"} in metas
    assert "prefers-color-scheme: dark" in text
    # every table scrolls in a box of its own
    assert text.count("<table>") == text.count('<div class="scroll" tabindex="0"><table>') > 5
    assert len(outline.all("html")) == len(outline.all("h1")) == 1


def test_the_page_needs_nothing_from_outside(committed, outline):
    assert not {"script", "link", "iframe", "object", "base"} & {tag for tag, _ in outline.tags}
    references = [
        value for _, attributes in outline.tags for name, value in attributes.items() if name in ("src", "href")
    ]
    assert references
    assert all(value.startswith(("data:image/svg+xml;base64,", "#part-")) for value in references)
    style = re.search(r"<style>(.*?)</style>", committed.read_text(encoding="utf-8"), re.DOTALL)[1]
    assert "url(" not in style
    assert "@import" not in style


def test_pictures_are_drawings_with_a_description_and_without_references_of_their_own(outline):
    pictures = outline.all("img")
    assert pictures
    for picture in pictures:
        assert picture["alt"]
        drawing = base64.b64decode(picture["src"].partition(",")[2])
        for element in ElementTree.fromstring(drawing).iter():
            for name, value in element.attrib.items():
                if name.endswith("href"):
                    assert value.startswith("#")


def test_links_lead_to_the_sections(outline):
    targets = {f"#{attributes['id']}" for attributes in outline.all("section")}
    assert {attributes["href"] for attributes in outline.all("a")} == targets


def test_every_result_has_its_place(outline):
    words = " ".join(outline.words)
    for part in ("Kernels", "Associative recall", "Speed beside softmax", "Machines and versions", "add_laplace"):
        assert part in words
    assert "Accuracy of the grid: grid-accuracy" in words
    for path in RESULTS.glob("*.csv"):
        assert path.name in words
    # text of a file is text on the page
    assert "<b>&0.001" in words


def test_the_same_rows_give_the_same_page(committed, tmp_path):
    places = [str(RESULTS), str(committed.with_name("grid-accuracy.csv"))]
    assert main(["report", "--results", *places, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").read_bytes() == committed.read_bytes()


def test_models_have_their_tables_with_the_papers_figures(outline, tmp_path):
    words = " ".join(outline.words)
    assert "Scores of text models: text-h200" in words
    assert "paper: LoCo 2,048" in words
    machine = asdict(this_machine("cpu"))
    point = pareto.Point(
        kernel="add_bump", backend="auto", tokens=8192, precision="bf16", device="cpu", milliseconds=12.5, **machine,
        date="2026-01-02 03:04",
    )  # fmt: skip
    write(tmp_path / "pareto.csv", pareto.Point, [point])
    row = vision.Row(
        kernel="gauss", stage="scratch", bandwidth=1.0, learned=False, accuracy=87.25, teacher=None, steps=390,
        epochs=1.0, layerwise_steps=0, batch=128, processes=1, precision="bf16", seed=0, train_images=50000,
        test_images=10000, layers=12, heads=3, width=192, patch=4, seconds=1.0, device="cpu", threads=2,
        transformers="5.0", **machine, date="2026-01-02 03:04",
    )  # fmt: skip
    write(tmp_path / "vision.csv", vision.Row, [row])
    assert main(["report", "--results", str(tmp_path), "--out", str(tmp_path)]) == 0
    words = " ".join(Outline((tmp_path / "report.html").read_text(encoding="utf-8")).words)
    for part in ("Time of a document: pareto", "12.5", "Accuracy of vision models: vision", "87.25"):
        assert part in words


def test_the_report_in_the_documents_is_of_the_committed_results(tmp_path):
    assert main(["report", "--results", str(RESULTS), "--out", str(tmp_path)]) == 0
    # drawings depend on the version of matplotlib
    here, there = (
        re.sub(r'src="[^"]*"', "", (folder / "report.html").read_text(encoding="utf-8"))
        for folder in (tmp_path, ROOT / "docs")
    )
    assert here == there, "run `make report`"


def drawings():
    """The committed figures of the experiments, drawn anew."""
    rows = {name: read(RESULTS / f"{name}.csv", kind) for name, kind in FIGURES.items()}
    yield "recall-h200", recall_plot.draw(rows["recall-h200"], recall.conditions(rows["recall-h200"]))
    yield "mqar-h200", mqar_plot.draw(rows["mqar-h200"], mqar.conditions(rows["mqar-h200"]))
    yield "h200-paper", paper_plot.draw(rows["h200-paper"])


def test_the_committed_figures_are_of_the_committed_rows(tmp_path):
    import matplotlib
    from matplotlib.image import imread

    for name, figure in drawings():
        committed = RESULTS / f"{name}.png"
        if f"Matplotlib version{matplotlib.__version__},".encode() not in committed.read_bytes():
            pytest.skip("drawn with another version of matplotlib")
        figure.savefig(tmp_path / f"{name}.png")
        here, there = (imread(path) for path in (tmp_path / f"{name}.png", committed))
        assert here.shape == there.shape
        assert abs(here - there).max() < 0.01, f"{committed} is older than its rows or the code that draws it"


def test_results_that_the_commands_left_here_are_found(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 0
    assert "the page has the kernels only" in capsys.readouterr().out
    for folder, name in (("sortattn-bench", "cpu.csv"), ("sortattn-grid", "grid-cpu.csv")):
        (tmp_path / folder).mkdir()
        shutil.copy(RESULTS / name, tmp_path / folder)
    assert main(["report"]) == 0
    printed = capsys.readouterr().out.replace("\\", "/")
    assert "sortattn-bench/cpu.csv" in printed
    assert "sortattn-grid/grid-cpu.csv" in printed
    text = (tmp_path / "sortattn-report" / "report.html").read_text(encoding="utf-8")
    assert "Speed beside softmax: cpu" in text
    assert "Accuracy of the grid: grid-cpu" in text


@pytest.mark.parametrize("command", ["bench", "demo", "grid", "recall", "mqar"])
def test_every_command_leaves_its_results_where_the_report_looks(command):
    options = _parser().parse_args([command])
    assert str(options.out) in FOLDERS


def test_variants_of_a_run_come_after_it(outline):
    titles = [word for word in outline.words if word.startswith("Associative recall: ")]
    assert titles[-2:] == ["Associative recall: recall-h200", "Associative recall: recall-h200-authors"]


def test_a_place_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["report", "--results", str(tmp_path / "nowhere"), "--out", str(tmp_path)]) == 2
    assert "is not there; expected a results file or a folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_line_is_named(tmp_path, capsys):
    notes = tmp_path / "trials.csv"
    notes.write_text("trial,ms\nfirst,1\nsecond, with a comma,2\n")
    assert main(["report", "--results", str(notes), "--out", str(tmp_path)]) == 2
    assert f"{notes}, line 3, is damaged: expected 2 fields, got 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "is empty; expected a results file"), (b"\xff\xfe", "is not a CSV file")]
)
def test_a_file_that_is_no_table_is_named(tmp_path, capsys, content, message):
    notes = tmp_path / "notes.csv"
    notes.write_bytes(content)
    assert main(["report", "--results", str(notes), "--out", str(tmp_path)]) == 2
    assert f"{notes} {message}" in capsys.readouterr().err


def test_numbers_stand_to_the_right_also_where_some_are_missing():
    section = Section("")
    section.table("N,ms,name\n1,0.5,a\n2,-,-\n")
    assert re.findall(r'<th scope="col"([^>]*)>', section.parts[0]) == ["", "", ' class="words"']


def test_without_matplotlib_tables_remain_and_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", "--results", str(RESULTS / "cpu.csv"), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<img" not in text
    assert "sortattn[bench]" in text
    assert "add_riesz [ms]" in text


def test_words_are_escaped():
    section = Section("<a & b>")
    section.note("<script>alert(1)</script>")
    section.table('x,"<y>"\n"1 < 2",\'"\'', "3 > 2")
    text = page("<t>", [section])
    assert "<script>" not in text
    assert "&lt;a &amp; b&gt;" in text
    assert "1 &lt; 2" in text


@pytest.fixture(scope="module")
def chromium():
    found = browser.find()
    if found is None:
        pytest.skip("no Chromium: python tests/browser.py gets one")
    playwright = pytest.importorskip("playwright.sync_api")
    program, environment = found
    # containers allow no sandbox
    arguments = ["--no-sandbox", "--disable-gpu"]
    with playwright.sync_playwright() as player:
        window = player.chromium.launch(executable_path=program, args=arguments, env={**os.environ, **environment})
        yield window
        window.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desk"])
def test_a_browser_shows_it(committed, chromium, width, scheme, tmp_path):
    tab = chromium.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True)
    faults = []
    tab.on("console", lambda message: faults.append(message.text))
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.goto(committed.as_uri())
    # text is drawn, and nothing is wider than the screen but what scrolls by itself
    assert tab.evaluate("document.querySelector('nav a').offsetWidth") > 20
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    picture = tmp_path / "screen.png"
    tab.screenshot(path=picture)
    tab.close()
    assert faults == []
    from matplotlib.image import imread

    brightness = imread(picture)[..., :3].mean(-1)
    assert brightness.shape == (800, width)
    # paper and ink, the one that there is more of according to the scheme
    assert brightness.min() < 0.3
    assert brightness.max() > 0.8
    assert (brightness.mean() > 0.6) if scheme == "light" else (brightness.mean() < 0.4)
