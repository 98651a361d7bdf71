"""The page in a real browser: what is drawn is framed, read and shown, and nothing else gets in."""

import base64
import importlib.util
import io
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NUM_TEST, kill_all, rows, start
from PIL import Image

import app
import predict
from trainkit.errors import UsageError
from trainkit.tools import answers, page
from trainkit.tools.photos import read_picture

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
ALONE = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]  # Chromium itself calls home

# The points of a stroke in a box of 100 x 100, y downwards.
DIGITS = {1: "50,0 50,100", 7: "10,0 90,0 40,100"}


@pytest.fixture(scope="module")
def run_dir(
    small_mnist: Path, tmp_path_factory: pytest.TempPathFactory, run_main: Callable
) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "mnist"
    flags = ["--batch-size", 32, "--epochs", 4, "--run-dir", folder]
    run_main("train_mnist", "--dataset", small_mnist, *flags)
    return folder


def served(*arguments: object, script: str | Path = "app.py", **options: Any) -> Iterator[str]:
    """The address of the page of a run, and after the tests what SIGTERM leaves of it."""
    pytest.importorskip("gradio")
    if sys.platform == "win32":
        pytest.skip("the page is ended by SIGTERM, which Windows does not have")
    started = start(script, *arguments, **options)
    try:
        for line in started.stdout:
            if address := re.search(r"http://[\w.]+:\d+", line):
                break
        else:
            pytest.fail(started.stderr.read())
        yield address[0]
        started.send_signal(signal.SIGTERM)
        _, errors = started.communicate(timeout=20)
        assert started.returncode == 0, errors
        # A browser that is closed while its request is under way is no fault of the page.
        assert errors.count("Traceback") == errors.count("ClientDisconnect\n"), errors
    finally:
        kill_all(started)


@pytest.fixture(scope="module")
def address(run_dir: Path) -> Iterator[str]:
    yield from served(run_dir)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium on the PATH")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ALONE)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable]:
    """Open an address; in the end the page has asked nobody else and logged no error."""
    contexts, hosts, problems = [], set(), []

    def open_page(address: str, **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        tab = contexts[-1].new_page()
        tab.on("request", lambda r: hosts.add(r.url.split("/")[2]) if r.url[:4] == "http" else None)
        tab.on("pageerror", lambda problem: problems.append(str(problem)))
        tab.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        tab.goto(address)
        tab.wait_for_selector("h1")
        hosts.add(address.split("/")[2])
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert len(hosts) == 1, hosts
    assert problems == []


def stroke(
    tab: Any, digit: int, size: float = 0.7, right: float = 0.5, down: float = 0.5
) -> list[list[float]]:
    """The points of a digit on the page. size: of the pad; right, down: where there is room."""
    box = tab.locator("#pad").bounding_box()
    assert box["width"] == box["height"] == 282  # always: 280 and the border
    corner = np.array([box["x"], box["y"]]) + 16 + 250 * (1 - size) * np.array([right, down])
    points = np.array([point.split(",") for point in DIGITS[digit].split()], dtype=float)
    return (corner + 2.5 * size * points).tolist()


def draw(tab: Any, digit: int, *where: float) -> None:
    """Draw with the mouse."""
    first, *points = stroke(tab, digit, *where)
    tab.mouse.move(*first)
    tab.mouse.down()
    for point in points:
        tab.mouse.move(*point, steps=4)
    tab.mouse.up()


def wait(tab: Any) -> None:
    """Wait until what was asked last is answered."""
    tab.wait_for_function("document.querySelector('#answer').ariaBusy == 'false'")


def bars(tab: Any) -> dict[str, float]:
    """The names and values of the bars, in the order in which they are shown."""
    wait(tab)
    found = tab.locator("#answer progress").evaluate_all("e => e.map(b => [b.ariaLabel, b.value])")
    return dict(found)


def heading(tab: Any) -> str:
    return tab.locator("#answer h2").inner_text().strip()


def answered(tab: Any) -> str:
    """Which input the answer is to."""
    wait(tab)
    return tab.locator("#said").inner_text().splitlines()[0]


def seen(tab: Any, number: int = 0) -> np.ndarray:
    """The pixels of one of the two views."""
    source = tab.locator(".views img").nth(number).get_attribute("src")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))))


# No black pixel on the pad.
BLANK = """pad => { const d = pad.getContext('2d').getImageData(0, 0, 280, 280).data;
  return d.every(value => value > 60); }"""


def answer(model: torch.nn.Module, picture: np.ndarray) -> list[float]:
    with torch.inference_mode():
        return model(torch.tensor(picture)[None, None])[0].tolist()


def assert_framed(picture: np.ndarray) -> None:
    """As MNIST's digits are: bright on black, in 20 x 20, which may touch 21."""
    assert picture.shape == (28, 28) and picture[0].max() == 0
    assert 18 <= np.ptp(np.nonzero(picture > 64), axis=1).max() + 1 <= 21


def test_a_seven_drawn_with_the_mouse_is_framed_and_its_bars_are_the_models(
    address: str, run_dir: Path, open_page: Callable
) -> None:
    tab = open_page(address, viewport={"width": 1280, "height": 800})
    (title,) = tab.locator("h1").all_inner_texts()
    accuracy = rows(run_dir, "epochs")[-1]["eval_accuracy"]
    assert title == f"mnist: {accuracy:.2%} of {NUM_TEST} test pictures right"
    draw(tab, 7, 0.4, 0.9, 0.1)
    shown = bars(tab)
    assert list(shown.values()) == sorted(shown.values(), reverse=True)
    assert_framed(seen(tab))
    model, _ = predict.load_run(run_dir)
    expected = answer(model, seen(tab))
    assert [shown[str(digit)] for digit in range(10)] == pytest.approx(expected, abs=1e-4)
    assert heading(tab) == tab.locator(".bars span").first.inner_text() == "7"
    weight = "e => e.map(span => getComputedStyle(span).fontWeight > 500)"
    assert tab.locator(".bars span").evaluate_all(weight) == [True] * 2 + [False] * 18
    assert answered(tab) == "your drawing"
    overlay = seen(tab, 1).astype(int)
    assert overlay.shape == (28, 28, 3)
    assert (overlay[..., 0] - overlay[..., 2]).max() > 100  # orange: some pixels speak for it
    tab.locator("#clear").click()
    tab.wait_for_selector("#answer progress", state="detached")
    draw(tab, 1)
    bars(tab)
    assert np.ptp(np.nonzero(seen(tab) > 64)[1]) < 8


def test_an_answer_does_not_stand_while_the_next_one_is_made(
    address: str, open_page: Callable
) -> None:
    tab = open_page(address)
    draw(tab, 7)
    wait(tab)
    tab.locator("#pad").hover()
    tab.mouse.down()
    assert not tab.locator("#answer h2").is_visible()
    tab.mouse.up()
    wait(tab)
    assert tab.locator("#answer h2").is_visible()
    # What is asked before Clear is not answered after it.
    draw(tab, 7)
    tab.locator("#clear").click()
    tab.wait_for_timeout(1000)
    assert not tab.locator("#answer h2").count()


def test_a_finger_on_a_phone_in_the_dark_draws_too(address: str, open_page: Callable) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    tab = open_page(address, color_scheme="dark", **phone)
    touch = tab.context.new_cdp_session(tab)
    kinds = ["touchStart", "touchMove", "touchMove"]
    for kind, at in zip(kinds, stroke(tab, 7), strict=True):
        touch.send(
            "Input.dispatchTouchEvent",
            {"type": kind, "touchPoints": [dict(zip("xy", at, strict=True))]},
        )
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert len(bars(tab)) == 10
    assert_framed(seen(tab))
    last = tab.locator("#answer progress").last.bounding_box()
    assert tab.evaluate("scrollY") == 0 and last["y"] + last["height"] < 844
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", background)[:3])) < 60


def test_the_page_can_be_used_with_the_keyboard_and_heard(
    address: str, open_page: Callable
) -> None:
    tab = open_page(address)
    draw(tab, 7)
    wait(tab)
    stops = []
    tab.locator("#clear").focus()
    for _ in range(9):
        name = "document.activeElement.name || document.activeElement.id"
        stops.append(tab.evaluate(name))
        if stops[-1] == "test picture":
            tab.keyboard.press("ArrowRight")
            tab.keyboard.press("ArrowRight")
            assert answered(tab) == "test picture: 2"
            shown = bars(tab)
            assert max(shown, key=shown.get) == heading(tab)
            assert (tab.locator("#pad").evaluate(BLANK), stops) == (True, stops)
        if stops[-1] == "worst mistake":
            tab.keyboard.press("Space")
            assert not tab.locator("input[name='test picture']:checked").count()
            truth, said = re.fullmatch(
                r"worst mistake: (\d), taken for (\d)", answered(tab)
            ).groups()
            assert truth != said == heading(tab).removeprefix("unsure, perhaps ")
        tab.keyboard.press("Tab")
    assert stops[:5] == ["clear", "brush", "file", "test picture", "worst mistake"]
    tree = tab.locator("body").aria_snapshot()
    for said in (
        'heading "mnist: ',
        'img "pad to draw on"',
        'slider "brush"',
        'group "Test pictures"',
        'radio "3"',
        "- status:",
        'progressbar "7"',
    ):
        assert said in tree, tree


def test_a_picture_file_is_read_and_one_that_is_none_is_one_sentence(
    address: str, run_dir: Path, open_page: Callable, tmp_path: Path
) -> None:
    tab = open_page(address)
    draw(tab, 7)
    wait(tab)
    sheet = Image.new("RGB", (300, 200), "white")
    sheet.paste((20, 20, 60), (100, 40, 112, 160))
    sheet.save(tmp_path / "one.jpg")
    tab.set_input_files("#file", tmp_path / "one.jpg")
    assert answered(tab) == "one.jpg"
    assert tab.locator("#pad").evaluate(BLANK)
    _, about = predict.load_run(run_dir)
    expected = read_picture(tmp_path / "one.jpg", 28, about["pictures"])
    assert np.array_equal(seen(tab), expected[0, 0])
    Image.new("1", (6000, 6000)).save(tmp_path / "bomb.png")  # few bytes, many pixels
    (tmp_path / "photo.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(100))
    for name in ("bomb.png", "photo.heic"):
        tab.set_input_files("#file", tmp_path / name)
        assert answered(tab).startswith(name)
        said = tab.locator("#said").inner_text()
        assert "Save it as PNG or JPEG." in said and "Error" not in said
        assert not tab.locator(".views").count()
    draw(tab, 1)
    assert answered(tab) == "your drawing" and tab.locator("#file").input_value() == ""


def test_what_is_sent_is_small_and_never_a_file(address: str) -> None:
    host, port = address.removeprefix("http://").split(":")
    for where, length in (
        ("upload", "Content-Length: 9"),
        ("upload/", "Content-Length: 0"),
        ("component_server", f"Content-Length: {page.MAX_REQUEST + 1}"),
        ("component_server", "Transfer-Encoding: chunked"),
    ):
        with socket.create_connection((host, int(port)), timeout=10) as line:
            line.sendall(
                f"POST /gradio_api/{where} HTTP/1.1\r\nHost: {host}:{port}\r\n"
                f"{length}\r\n\r\n".encode()
            )
            assert b" 413 " in line.recv(1000), (where, length)


def test_a_name_that_looks_like_code_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "<b>${1}{{2}}"
    monkeypatch.setattr(answers, "evidence", lambda model, picture, answer: torch.zeros(28, 28))
    said, details = answers.describe(
        lambda pictures: torch.tensor([[0.25, 0.75]]),
        {"classes": ["b", name], "calibration": {"threshold": 0.8}},
        torch.zeros(28, 28, dtype=torch.uint8),
    )
    html = page.shelf("test picture", torch.zeros(1, 28, 28, dtype=torch.uint8), [name])
    assert said.startswith("<h2>unsure, perhaps ") and "75.00 % is less than for 95 in 100" in said
    for text in (said, details, html):
        assert "&lt;b&gt;${1}{{2}}" in text and name not in text


def test_what_is_missing_is_asked_for_by_name(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"python train_mnist\.py --run-dir .*/absent`"):
        app.main([str(tmp_path / "absent")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install gradio"):
        app.main([str(run_dir)])


def test_a_regression_answers_its_fields_and_draws_what_is_touched(
    tmp_path: Path, run_main: Callable, browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a server: what the page asks is answered in this process."""
    drawn, drawing = [], page.drawing
    monkeypatch.setattr(page, "drawing", lambda *its: drawn.append(its[0]) or drawing(*its))
    table = [
        f"{area},{city},1970-01-0{area % 7 + 1},{area * 3 + 100 * (city == 'Rome')}"
        for area in range(20, 220)
        for city in ("Bonn", "Rome<b>")
    ]
    (tmp_path / "houses.csv").write_text("\n".join(["area,city,age,price", *table]))
    flags = ["--target", "price", "--epochs", 5, "--run-dir", tmp_path / "run"]
    run_main("train_regression", "--data", tmp_path / "houses.csv", *flags)
    model, about = app.load(tmp_path / "run")
    html, answer = app.regression_page(model, about, "run")
    assert "<label>age (days since 1970) <" in html
    tab = browser.new_page(viewport={"width": 390, "height": 844})
    tab.set_content(f"<style>{page.CSS}</style>{html}")
    tab.expose_function("answer", answer)
    tab.evaluate(f"const element = document.body, server = window; {page.SCRIPT}")
    tab.wait_for_selector("#answer .curve img[alt='price along area']")
    assert tab.locator("h1").inner_text().startswith("run: R2 ")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    area, city, age = (tab.locator(f"[name={name}]") for name in ("area", "city", "age"))
    area.fill("200")
    for chosen, encoded in (("Bonn", [1, 0]), ("Rome<b>", [0, 1])):
        city.select_option(chosen)
        wait(tab)
        with torch.inference_mode():
            row = [200, *encoded, float(age.input_value())]
            expected = model(torch.tensor([row], dtype=torch.float64)).item()
        shown = float(heading(tab).split(":")[1].replace(",", ""))
        assert shown == pytest.approx(expected, rel=1e-5)  # six digits are shown
        line, dot = drawn[-1].axes[0].lines
        assert dot.get_xydata() == pytest.approx(np.array([[200, expected]]))
        assert np.interp(200, *line.get_data()) == pytest.approx(expected)
    tab.locator("input[type=range]").first.fill("100")
    assert area.input_value() == "100"
    area.fill("")
    wait(tab)
    assert answered(tab) == "Fill in every field." and not tab.locator(".curve").count()
    area.fill("1e9")
    age.fill("3")  # the drawing follows what is touched
    tab.wait_for_selector("#answer .curve img[alt='price along age']")
    assert "In training area was 2" in tab.locator("#said").inner_text()


def test_a_field_spans_the_training_rows_in_whole_steps_where_they_are_whole() -> None:
    about = {
        "features": ["price", "year"],
        "feature_mean": [12.345678, 1954.6],
        "feature_std": [3.0, 30],
        "feature_range": [[-1.4000000000000001, 20], [1890, 2023]],
        "feature_whole": [False, True],
    }
    html, span = app.number_field("year", about)
    assert 'step="1" min="1890" max="2023" value="1955"' in html and span == (1890, 2023)
    assert 'step="0.1" min="-1.4" max="20" value="12.3"' in app.number_field("price", about)[0]


def test_what_cannot_be_drawn_is_uploaded_first_and_a_doubt_is_explained() -> None:
    about = {"examples": {}, "predictions": {}, "size": 28, "classes": ["apple", "plum"]}
    about["metrics"] = {"eval_accuracy": 0.9, "eval_samples": 10}
    for classes, first in ((["apple", "plum"], "file"), ([*"0123"], "pad")):
        html, _ = app.classifier_page(None, about | {"classes": classes}, "run")
        ids = re.findall('id="(file|pad)"', html)
        assert ids[0] == first and len(ids) == 2
    assert [page.percent(share) for share in (0.9997, 0.99995, 1.0)] == [
        "99.97 %",
        "&gt; 99.99 %",
        "100.00 %",
    ]


@pytest.mark.slow
def test_an_exported_folder_is_a_page_without_the_repository(
    run_dir: Path, tmp_path: Path, open_page: Callable
) -> None:
    """As a Space starts it: from its own folder, without arguments, and every host may ask."""
    predict.main([str(run_dir), "--export", "hub"])
    shutil.copytree(run_dir / "hub", tmp_path / "space")
    surroundings = {"PYTHONPATH": "", "GRADIO_SERVER_NAME": "0.0.0.0", "GRADIO_SERVER_PORT": "7991"}
    for address in served(script=tmp_path / "space" / "app.py", cwd=tmp_path, env=surroundings):
        assert address == "http://localhost:7991"  # how gradio prints 0.0.0.0
        tab = open_page("http://127.0.0.1:7991")
        draw(tab, 7)
        shown = bars(tab)
        model, _ = predict.load_run(run_dir)
        expected = answer(model, seen(tab))
        assert [shown[str(digit)] for digit in range(10)] == pytest.approx(expected, abs=1e-4)
        assert len(tab.locator("input[name='test picture']").all()) == 10
        assert heading(tab) == "7"
        tab.close()
