"""The page in a real browser: what is drawn is framed, read and shown, and nobody else is asked."""

import contextlib
import io
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import colours
import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from conftest import refused, run, wait_until
from faults import free_port
from PIL import Image

import app
import predict
from trainkit.tables.columns import Column, encode
from trainkit.text import write_number
from trainkit.tools import answers, page

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


def seen(tab: Any, number: int = 0) -> np.ndarray:
    """The pixels of what the network sees, or (number 1) of what speaks for the answer."""
    source = tab.locator("#why img").nth(number).get_attribute("src")
    return np.asarray(Image.open(io.BytesIO(tab.request.get(source).body())))


def test_a_seven_that_is_drawn_is_framed_and_its_bars_are_the_models(
    mnist_run, tmp_path, open_page
):
    tab = open_page(mnist_run)
    tab.wait_for_selector('#pad button[aria-label="Brush"]')
    tab.wait_for_selector("#pad .empty", state="detached")
    tab.wait_for_timeout(300)
    box = tab.locator("#pad canvas").first.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    for number, (right, down) in enumerate([(-60, -80), (50, -80), (-20, 80)]):
        tab.mouse.move(x + right, y + down, steps=8)
        if not number:
            tab.mouse.down()
    tab.mouse.up()
    tab.wait_for_selector(".said h2")
    assert tab.locator(".said h2").inner_text().endswith("7")
    picture = seen(tab)
    assert picture.shape == (28, 28) and picture[0].max() == 0  # framed as MNIST's digits are
    assert 18 <= np.ptp(np.nonzero(picture > 64), axis=1).max() + 1 <= 21
    predictor = predict.load_run(mnist_run)
    with torch.inference_mode():
        share = predictor(torch.tensor(picture)[None, None])[0, 7].item()
    shown = tab.locator("[data-testid='7-confidence-set'] meter").get_attribute("value")
    assert float(shown) == pytest.approx(share, abs=1e-4)
    upload = tab.locator("#file")
    photo = tmp_path / "seven.png"
    Image.fromarray(picture).save(photo)
    tab.set_input_files("#file input[type=file]", photo)  # it takes the place of the drawing
    tab.wait_for_function("document.querySelector('#file').innerText.includes('seven')")
    tab.wait_for_timeout(500)
    tab.locator(".shelf").first.locator("button img").first.click()
    tab.wait_for_function("document.querySelector('.said h2').innerText.endsWith('0')")
    tab.wait_for_function("!document.querySelector('#file').innerText.includes('seven')")
    tab.wait_for_timeout(500)
    assert tab.locator(".said h2").inner_text().endswith("0") and upload.is_visible()
    (tmp_path / "photo.png").write_text("not a picture")
    tab.set_input_files("#file input[type=file]", tmp_path / "photo.png")
    tab.wait_for_function("document.querySelector('.said').innerText.includes('PNG or JPEG')")


def test_a_photo_is_uploaded_and_shown_in_colour_with_what_was_confused(tmp_path, open_page):
    run_dir = colours.make_run(tmp_path / "photos")
    tab = open_page(run_dir, "--script", colours.__file__)
    assert not tab.locator("#pad").count()
    photo = colours.photograph(tmp_path, "green", 0.9)
    tab.set_input_files("#file input[type=file]", photo)
    tab.wait_for_selector("#why img")
    assert tab.locator(".said h2").inner_text() == "green"
    sees, why = seen(tab, 0), seen(tab, 1)
    assert sees.shape == (64, 64, 3) and sees[32, 32].argmax() == 1
    assert why[32, 32, 0] > 100 > why[32, 32, 2]  # orange: the middle speaks for it
    tab.locator(".shelf").last.locator("button img").first.click()
    tab.wait_for_function("document.querySelector('#why').innerText.includes('a smaller copy')")
    evaluated = predict.load_run(run_dir, Path(colours.__file__))
    logits = evaluated.evaluated["logits"][40] / evaluated.calibration["temperature"]
    said = f"green\n{logits.softmax(0).max():.2%}"  # as it was evaluated, not of the small copy
    assert tab.locator(".said").last.inner_text().split() == said.split()
    assert "red, taken for green" in tab.locator(".shelf").last.inner_text()
    tab.get_by_text("confusions").click()
    tab.wait_for_selector("img[src^='data:image']")


def test_sliders_and_lists_of_a_table_are_answered(table_run, open_page):
    port = free_port()
    tab = open_page(table_run, "--port", port)
    assert tab.url == f"http://127.0.0.1:{port}/"
    tab.wait_for_selector(".said h2")
    before = tab.locator(".said h2").inner_text()
    text = tab.locator("body").inner_text()
    assert "It predicts price, and is usually off by less than " in text, text
    assert "loss" not in text
    # It is the prediction for the values that the page shows.
    predictor = predict.load_run(table_run)
    shown = tab.locator("input[type=number]").evaluate_all("fields => fields.map(f => +f.value)")
    city = tab.get_by_role("combobox").input_value()
    spans = {name: page.find_span(predictor.metadata, name) for name in ("area", "age")}
    age = tab.locator("input.time").input_value()
    assert len(shown) == 1 and age == "1970-01-04"  # a date, and no days since 1970
    row = [shown[0], city, age]
    assert before in page.answer_row(predictor, ["area", "city", "age"], spans, "", *row)[0]
    labels = tab.locator("label, .head").all_inner_texts()
    assert not any("days since 1970" in label for label in labels), labels
    tab.locator("input.time").fill("1970-01-02")
    tab.keyboard.press("Enter")
    tab.wait_for_function(f"document.querySelector('.said h2').innerText != {before!r}")
    before = tab.locator(".said h2").inner_text()
    tab.locator("input[type=number]").first.fill("200")
    tab.keyboard.press("Tab")
    tab.wait_for_function(f"document.querySelector('.said h2').innerText != {before!r}")
    assert tab.locator(".said h2").inner_text().startswith("price: ")


def test_a_text_is_answered_as_it_is_typed(run_main, tmp_path, open_page):
    lines = "".join(
        f"it was {word} {n},{word[0]}<b>\n" for n in range(20) for word in ("good", "bad")
    )
    (tmp_path / "lines.csv").write_text(f"text,label\n{lines}")
    run_main("examples.text", "--data", tmp_path / "lines.csv", "--run-dir", tmp_path / "run")
    tab = open_page(tmp_path / "run")
    tab.locator("#text textarea").fill("so bad")
    tab.wait_for_selector(".said h2")
    assert "b<b>" in tab.locator(".said h2").inner_text()
    predictor = predict.load_run(tmp_path / "run")
    with torch.inference_mode():
        share = predictor(predictor.read("so bad")[0])[0, 0].item()
    shown = tab.locator("[data-testid='b<b>-confidence-set'] meter").get_attribute("value")
    assert share > 0.5 and float(shown) == pytest.approx(share, abs=1e-4)
    assert page.answer_text(predictor, " \n") == ("", None)


def test_a_row_is_answered_in_its_own_units_with_the_curve_through_it(table_run):
    predictor = predict.load_run(table_run)
    names = ["area", "city", "age"]
    spans = {name: page.find_span(predictor.metadata, name) for name in ("area", "age")}
    low, high = predictor.metadata["feature_range"][0]
    assert spans["age"] == (0, 6, 3, 1) and spans["area"][:2] == (low, high)
    said, figure = page.answer_row(predictor, names, spans, "city", 200, "Rome", 3)
    row = pd.DataFrame({"area": ["200"], "city": ["Rome"], "age": ["1970-01-04"]})
    features, _ = encode(row, [Column(**fields) for fields in predictor.metadata["columns"]])
    expected = predictor(torch.from_numpy(features)).item()
    assert said == f"<h2>price: {expected:,.6g}</h2>"
    asked = page.answer_row(predictor, names, spans, "age", 200, "Rome", "next week")
    assert asked == ("age: write a date such as 2020-01-31", None)
    _, dates = page.answer_row(predictor, names, spans, "age", 200, "Rome", "1970-01-04")
    assert dates.axes[0].lines[1].get_xdata()[0] == datetime(1970, 1, 4)
    line, dot = figure.axes[0].lines
    assert dot.get_xydata() == pytest.approx(np.array([[200, expected]]))
    assert np.interp(200, *line.get_data()) == pytest.approx(expected)


@pytest.mark.parametrize("name, shown",
    [("weight (kg)", "2 kg"), ("speed [km/h]", "2 km/h"), ("body_mass_g", "2 g"), ("item", "2")],
)  # fmt: skip
def test_the_head_of_a_page_says_the_target_its_unit_and_how_far_off_it_is(name, shown):
    truth = torch.zeros(20, 1)
    off = torch.tensor([*[1.0] * 8, 2, 2, *[3.0] * 8, 9, 9])[:, None]
    run = SimpleNamespace(
        evaluated={"prediction": off, "target": truth}, metadata={"targets": [name]}
    )
    unit = shown[1:]
    assert page.describe_quality(run) == (
        f"It predicts {name}, and is usually off by less than {shown}: for half of 20 samples that "
        f"it was not trained on, and for nine in ten by less than 3.6{unit}."
    )
    run.evaluated = {"prediction": torch.tensor([0, 1, 1, 1]), "target": torch.tensor([0, 1, 1, 0])}
    run.metadata["classes"] = ["a", "b"]
    assert page.describe_quality(run) == (
        f"It predicts {name}, and is right for 75.0% of 4 samples that it was not trained on; the "
        "largest class has 50.0%."
    )


def test_what_a_picture_shows_is_said_with_its_doubt_and_what_speaks_for_it(mnist_run):
    predictor = predict.load_run(mnist_run)
    shelves = page.find_shelves(predictor)
    numbers, captions = map(list, zip(*shelves["test pictures"], strict=True))
    assert captions == [*"0123456789"]
    assert predictor.evaluated["target"][numbers].tolist() == [*range(10)]
    assert all(re.fullmatch(r"\d, taken for \d", text) for _, text in shelves["worst mistakes"])
    seven = predictor.evaluated["image"][numbers[7]]
    said, shares, views = answers.describe_answer(predictor, seven)
    assert max(shares, key=shares.get) in said and list(shares) == captions
    assert (views[0][0] == seven[0].numpy()).all()
    overlay = views[1][0].astype(int)
    assert (overlay[..., 0] - overlay[..., 2]).max() > 100  # orange: some pixels speak for it
    predictor.metadata["classes"] = ["<b>x"] * 10
    predictor.calibration["threshold"] = 1.1
    said, *_ = answers.describe_answer(predictor, seven)
    assert said.startswith("<h2>unsure, perhaps &lt;b&gt;x</h2>") and "95 in 100" in said
    for drawn in (None, {"composite": np.full((280, 280), 255, np.uint8)}):
        assert page.answer_drawing(predictor, drawn) == ("", None, None)


@pytest.mark.parametrize(
    "value, digits, written",
    [(6712.34, 3, "6,712"), (1234567.0, 6, "1,234,567"), (0.00001234, 3, "0.0000123"),
     (0.0, 3, "0"), (99.99, 3, "100"), (1e20, 3, "1e+20"), (float("nan"), 3, "nan")],
)  # fmt: skip
def test_numbers_are_written_as_people_do(value, digits, written):
    assert write_number(value, digits) == written
    assert page.with_unit(value, "price_eur", digits) == f"{written} eur"


def test_a_refused_picture_is_given_the_reason_and_the_remedy_that_fits(mnist_run, tmp_path):
    predictor = predict.load_run(mnist_run)
    files = {
        "text.png": "Save it as PNG or JPEG.",
        "blank.png": "blank",
        "half.png": "cannot be read: ",
    }
    (tmp_path / "text.png").write_text("not a picture")
    Image.new("L", (50, 50), 255).save(tmp_path / "blank.png")
    Image.effect_noise((64, 64), 99).save(tmp_path / "half.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "half.png").read_bytes()[:1500])
    for name, words in files.items():
        said, *_ = page.answer_file(predictor, str(tmp_path / name))
        assert words in said and str(tmp_path) not in said and "Error:" not in said
        assert ("Save it as" in said) == (name == "text.png")


def test_a_run_that_is_not_there_is_said_to_who_types_the_command(tmp_path):
    ended = run("app.py", tmp_path / "absent", code=2)
    assert ended.stderr.count("\n") == 1
    assert f"error: {tmp_path}/absent is not a finished run" in ended.stderr


def test_what_is_missing_is_asked_for_by_name(mnist_run, tmp_path, monkeypatch):
    with refused("absent is not a finished run"):
        app.main([str(tmp_path / "absent")])
    monkeypatch.setitem(sys.modules, "gradio", None)
    with refused("pip install gradio"):
        app.main([str(mnist_run)])
