"""The page in a real browser: what is drawn is framed, read and shown, and nobody else is asked."""

import contextlib
import io
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainkit import app, predict

import colours
import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from conftest import ROOT, refused, wait_until, without_numbers
from PIL import Image

from benchmarks.pictures import draw_seven
from trainkit.tables.columns import Column, encode
from trainkit.tools import page

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
ALONE = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]  # Chromium itself calls home
# The pad draws itself anew in each frame, which without a GPU takes a core: ten a second will do.
FEW_FRAMES = "window.requestAnimationFrame = draw => setTimeout(() => draw(performance.now()), 100)"


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium on the PATH")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ALONE)
        yield browser
        browser.close()


@contextlib.contextmanager
def served(nursery: Any, *arguments: Any) -> Iterator[str]:
    """The address of a page that app.main serves in a forked process, which SIGTERM ends."""
    outcomes = []

    def serve():
        outcomes.append(nursery.run("app.py", *arguments, timeout=120, modules=["gradio"]))

    def ports() -> list[int]:
        """Where it listens."""
        found = []
        for child in psutil.Process(nursery.process.pid).children():
            with contextlib.suppress(psutil.Error):  # it has ended
                found += [c.laddr.port for c in child.net_connections() if c.status == "LISTEN"]
        return found

    server = threading.Thread(target=serve)
    server.start()
    wait_until(lambda: outcomes or ports())
    try:
        assert not outcomes, outcomes[0].output
        address = f"http://127.0.0.1:{ports()[0]}/"
        yield address
    finally:
        for child in psutil.Process(nursery.process.pid).children():
            child.send_signal(signal.SIGTERM)
        server.join()
    assert outcomes[0].codes == [0], outcomes[0].output
    assert f": {address} (Ctrl-C ends it)\n" in outcomes[0].stdout


@pytest.fixture
def open_page(browser, nursery):
    """Open the page of a run; in the end it has asked nobody else and logged no error."""
    pytest.importorskip("gradio")
    hosts, problems = set(), []
    with contextlib.ExitStack() as until_the_end:

        def open_page(*arguments: Any) -> Any:
            address = until_the_end.enter_context(served(nursery, *arguments))
            tab = browser.new_page()
            tab.add_init_script(FEW_FRAMES)
            tab.on(
                "request", lambda r: hosts.add(r.url.split("/")[2]) if r.url[:4] == "http" else None
            )
            tab.on("pageerror", lambda problem: problems.append(str(problem)))
            tab.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
            tab.goto(address)
            tab.wait_for_selector("h1")
            return tab

        yield open_page
    assert len(hosts) == 1 and problems == [], (hosts, problems)


def seen(tab: Any) -> np.ndarray:
    """The pixels of what the network sees."""
    source = tab.locator("#why img").first.get_attribute("src")
    return np.asarray(Image.open(io.BytesIO(tab.request.get(source).body())))


def test_a_seven_that_is_drawn_is_framed_and_answered_as_by_the_model(
    mnist_run, tmp_path, open_page
):
    tab = open_page(mnist_run)
    draw_seven(tab)
    shown = (ROOT / "docs" / "pictures" / "app.txt").read_text()  # what README's picture says
    said = tab.locator(".said").first.inner_text()  # the answer, which may be unsure
    assert without_numbers(tab.locator("body").inner_text().replace(said, "7 99.99%")) == (
        without_numbers(shown)
    ), "python -m benchmarks.pictures"
    picture = seen(tab)
    assert picture.shape == (28, 28) and picture[0].max() == 0  # framed as MNIST's digits are
    assert 18 <= np.ptp(np.nonzero(picture > 64), axis=1).max() + 1 <= 21
    predictor = predict.load_run(mnist_run)
    with torch.inference_mode():
        share = predictor(torch.tensor(picture)[None, None])[0, 7].item()
    assert f"7 {share:.2%}" in said
    (tmp_path / "photo.png").write_text("not a picture")
    tab.get_by_text("a picture file").click()
    tab.set_input_files("#file input[type=file]", tmp_path / "photo.png")
    tab.wait_for_function("document.querySelector('.said').innerText.includes('not one of PNG')")


def test_a_page_begins_with_an_evaluated_row_and_with_the_answer_on_top(table_run):
    pytest.importorskip("gradio")
    predictor = predict.load_run(table_run)
    houses = pd.read_csv(table_run.parent / "houses.csv", dtype=str)
    predictor.metadata["columns"][1]["name"] = "town_of_birth"
    predictor.metadata["features"] = ["area", "town_of_birth=Bonn", "town_of_birth=Rome", "age"]
    parts = page.build(predictor, "a run").get_config_file()["components"]
    fields = {
        props["label"]: props["value"] for each in parts if (props := each["props"]).get("label")
    }
    assert fields.keys() == {"area", "town of birth", "age"}
    assert fields["town of birth"] in ("Bonn", "Rome") and fields["age"].startswith("1970-01-0")
    shown = [f"{fields['area']:g}", fields["town of birth"], fields["age"]]
    assert (houses[["area", "city", "age"]] == shown).all(axis=1).any()
    kinds = [each["type"] for each in parts]
    said = next(p for each in parts if (p := each["props"]).get("elem_classes") == ["said"])
    assert said["value"].startswith("<h2>price: ") and kinds.count("html") == 2
    assert max(n for n, kind in enumerate(kinds) if kind == "html") < kinds.index("slider")


def test_a_row_is_answered_in_its_own_units(table_run):
    predictor = predict.load_run(table_run)
    row = pd.DataFrame({"area": ["200"], "city": ["Rome"], "age": ["1970-01-04"]})
    features, _ = encode(row, [Column(**fields) for fields in predictor.metadata["columns"]])
    expected = predictor(torch.from_numpy(features)).item()
    said = page.answer_row(predictor, 200, "Rome", "1970-01-04")
    assert said == f"<h2>price: {page.write_known(expected, *page.usual_errors(predictor))}</h2>"
    said = page.answer_row(predictor, 200, "Rome", "next week")
    assert "age: &#x27;next week&#x27; is not a date like 2020-01-31" in said


def test_a_number_is_written_as_far_as_it_is_known():
    assert page.write_known(3648.46, 189) == "about 3,650"
    assert page.write_known(0.123456, 0.0123) == "about 0.123"
    assert page.write_known(-0.5, 0.01) == "about -0.5"
    assert page.write_known(-12, 5000) == "about 0"
    assert page.write_known(3648.46, 0) == "3,648.46"


def test_a_page_begins_with_the_means_where_each_row_lacks_a_cell(table_run):
    predictor = predict.load_run(table_run)
    mean = predictor.metadata["feature_mean"]
    assert page.first_row(predictor).tolist() != mean
    predictor.metadata["columns"][1]["categories"][0] = "NA"
    predictor.metadata["features"][1] = "city=NA"
    assert page.first_row(predictor)[2] == pytest.approx(1)
    predictor.evaluated["feature"][:, 1:3] = 0  # no row has a category
    assert page.first_row(predictor).tolist() == mean


def test_a_text_is_answered_with_its_shares(run_main, tmp_path):
    lines = "".join(
        f"it was {word} {n},{word[0]}<b>\n" for n in range(20) for word in ("good", "bad")
    )
    (tmp_path / "lines.csv").write_text(f"text,label\n{lines}")
    run_main("examples.text", "--data", tmp_path / "lines.csv", "--run-dir", tmp_path / "run")
    predictor = predict.load_run(tmp_path / "run")
    said, shares = page.answer_text(predictor, "so bad")
    assert said.startswith("<h2>") and "b&lt;b&gt;" in said
    with torch.inference_mode():
        share = predictor(predictor.read("so bad")[0])[0, 0].item()
    bar = f"<span>b&lt;b&gt;</span><meter value={share:.6f}></meter><span>{share:.2%}</span>"
    assert share > 0.5 and bar in shares
    said, shares = page.answer_text(predictor, " \n")
    assert "paste a text" in said and shares == ""


def test_a_photo_is_answered_in_colour_with_what_speaks_for_it(tmp_path):
    run_dir = colours.make_run(tmp_path / "photos")
    predictor = predict.load_run(run_dir, Path(colours.__file__))
    photo = colours.photograph(tmp_path, "green", 0.9)
    said, shares, ((sees, _), (why, _)) = page.answer_picture(predictor, str(photo))
    assert said.startswith("<h2>green ") and "<span>green</span>" in shares[:50]
    assert sees.shape == (64, 64, 3) and sees[32, 32].argmax() == 1
    assert why[32, 32, 0] > 100 > why[32, 32, 2]  # orange: the middle speaks for it


def test_what_a_picture_shows_is_said_with_its_doubt_and_what_speaks_for_it(mnist_run, tmp_path):
    predictor = predict.load_run(mnist_run)
    (seven,) = predictor.evaluated["image"][predictor.evaluated["target"] == 7][0]
    Image.fromarray(seven.numpy()).save(tmp_path / "seven.png")
    said, shares, views = page.answer_picture(predictor, str(tmp_path / "seven.png"))
    (share,) = re.findall(r" ([\d.]+%)</h2>", said)
    assert f"</meter><span>{share}</span>" in shares and shares.count("<meter") == 10
    assert (views[0][0] == seven.numpy()).all()
    overlay = views[1][0].astype(int)
    assert (overlay[..., 0] - overlay[..., 2]).max() > 100  # orange: some pixels speak for it
    predictor.metadata["classes"] = [f"<b>{n}" for n in range(10)]
    predictor.calibration["threshold"] = 1.1
    said, *_ = page.answer_picture(predictor, str(tmp_path / "seven.png"))
    assert said.startswith("<h2>unsure, perhaps &lt;b&gt;")


def test_what_is_missing_is_asked_for_by_name(mnist_run, tmp_path, monkeypatch):
    with refused("absent is not a finished run"):
        app.main([str(tmp_path / "absent")])
    monkeypatch.setitem(sys.modules, "gradio", None)
    with refused("pip install gradio"):
        app.main([str(mnist_run)])
