"""The page in a real browser: every step, with the keyboard alone, in both themes, from a server and from a file.

Any request to another address than the test's own server fails the test, and so does an error on the page.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from explored import explorer, listening, small_model

import leftward as lw
from leftward.generation.rules import Bans, Row
from leftward.generation.sampling import distribution
from leftward.inspection.server import Explorer
from leftward.language_model import LanguageModel
from leftward.text.tokenizer import Tokenizer
from random_models import random_decoder

sync_api = pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the page's tests need chromium: apt-get install chromium")

STEPS = {
    "Architecture": ["stack", "block", "parameters", "kv-cache"],
    "Causal mask": ["attention", "attention-row", "heads", "leak"],
    "Normalisation": ["before-norm", "after-norm", "stream"],
    "Next token": ["next-token", "attribution", "losses", "lens"],
    "Generation": ["passes", "alternatives", "work", "cache"],
    "Variants and scale": ["rotary", "rotary-turns", "alibi", "sinusoidal"],
}
DRAWN_AS_TEXT = ("losses", "lens")


@pytest.fixture(scope="module")
def explored() -> Explorer:
    return explorer(window=6, attention_pattern="LG")


@pytest.fixture(scope="module")
def url(explored: Explorer) -> Iterator[str]:
    with listening(explored) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    yield from watched(browser, allowed=url)


def watched(browser: Any, allowed: str, expected: str = "nothing", **options: Any) -> Iterator[Any]:
    """A page on which nothing may go wrong but what is `expected`, and which may ask nobody but `allowed`."""
    faults: list[str] = []

    def only_allowed(route: Any) -> None:
        if route.request.url.startswith((allowed, "data:", "blob:")):
            route.continue_()
        else:
            faults.append(f"asks {route.request.url[:200]}")
            route.abort()

    context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
    context.route("**/*", only_allowed)
    made = context.new_page()
    made.set_default_timeout(20_000)
    made.on("pageerror", lambda error: faults.append(str(error)))
    made.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    yield made
    context.close()
    assert not [fault for fault in faults if expected not in fault]


def go(page: Any, address: str) -> None:
    """Load anew, even where the address differs behind its # only."""
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("main h1")


def says(page: Any, selector: str, text: str) -> None:
    sync_api.expect(page.locator(selector)).to_contain_text(text, timeout=20_000)


def check_step(page: Any, number: int) -> None:
    title = list(STEPS)[number - 1]
    assert page.locator("main h1").inner_text() == f"{number}. {title}"
    for name in STEPS[title]:
        body = page.locator(f'figure[data-figure="{name}"] .figure-body')
        body.locator("svg, table, span").first.wait_for()
        if name not in DRAWN_AS_TEXT:
            assert body.locator("svg *").count() > 3, name
    assert "NaN" not in page.locator("main").inner_text()
    assert "undefined" not in page.locator("main").inner_text()


def test_every_step(page: Any, url: str) -> None:
    for number, title in enumerate(STEPS, 1):
        go(page, f"{url}#step={number}")
        check_step(page, number)
        assert page.locator('[role="tab"][aria-selected="true"]').inner_text().endswith(title)
    page.wait_for_selector(".checks li.holds")
    assert page.locator(".checks li.holds").count() == 5 and page.locator(".checks li.fails").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_and_narrow_screens(browser: Any, url: str, scheme: str) -> None:
    """What is written can be read: contrast of 4.5 at least (WCAG), and nothing sticks out of the page."""
    for page in watched(browser, allowed=url, color_scheme=scheme, reduced_motion="reduce"):
        page.set_viewport_size({"width": 700, "height": 800})
        for number in range(1, 7):
            go(page, f"{url}#step={number}")
            check_step(page, number)
            for selector in (".lead", ".note", "aside p", ".readouts dt", ".readouts dd", "svg text.tick"):
                for ratio in page.evaluate(CONTRAST, selector):
                    assert ratio >= 4.5, (selector, ratio)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), number
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.keyboard.press("d")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


CONTRAST = """(selector) => {
  const light = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map(Number).map((c) => c / 255)
      .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (!colour.endsWith(", 0)") && colour !== "transparent") return colour;
    }
    return getComputedStyle(document.body).backgroundColor;
  };
  return [...document.querySelectorAll(selector)].slice(0, 20).map((node) => {
    const style = getComputedStyle(node);
    const [a, b] = [light(node.matches("svg *") ? style.fill : style.color), light(ground(node))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  });
}"""


def test_the_keyboard_alone(page: Any, url: str) -> None:
    go(page, url)
    for number in range(2, 7):
        page.keyboard.press("ArrowRight")
        check_step(page, number)
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    check_step(page, 2)
    page.keyboard.press("]")
    page.keyboard.press("]")
    page.keyboard.press(".")
    says(page, "[data-figure=attention] figcaption", "Layer 2, head 1")
    page.keyboard.press("[")
    page.keyboard.press(",")
    says(page, "[data-figure=attention] figcaption", "Layer 1, head 0")
    page.keyboard.press("ArrowUp")
    page.wait_for_url(re.compile("token=8"))
    assert page.locator(".token.locked").get_attribute("data-position") == "8"
    page.keyboard.press("Escape")
    page.wait_for_url(lambda address: "token=" not in address)
    assert page.locator(".token.locked").count() == 0
    page.keyboard.press("t")
    rows = page.locator('figure[data-figure="attention-row"] table tbody tr')
    assert rows.count() == 10  # what position 9 sees in layer 1, which has no window
    page.keyboard.press("t")
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")
    page.keyboard.press("5")
    check_step(page, 5)
    page.keyboard.press("n")
    assert "2 / 20" in page.locator(".readouts").inner_text()
    page.keyboard.press("b")
    assert "1 / 20" in page.locator(".readouts").inner_text()
    page.keyboard.press(" ")
    says(page, ".readouts", "3 / 20")
    page.keyboard.press(" ")
    # With Tab everything that can be used can be reached, and Enter uses it.
    page.locator("main").focus()
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.textContent.slice(0, 20)"))
    assert {"table", "save", "Write again"} <= reached


def test_one_selection_drives_all_steps(page: Any, url: str) -> None:
    go(page, f"{url}#step=2")
    page.locator('.token[data-position="4"]').hover()
    says(page, "[data-figure=attention-row] figcaption", "position 4")
    page.locator('.token[data-position="6"]').click()
    page.mouse.move(5, 5)
    for number, figure in ((2, "attention-row"), (4, "next-token")):
        page.keyboard.press(str(number))
        says(page, f"[data-figure={figure}] figcaption", "position 6")
    page.reload()
    says(page, "[data-figure=next-token] figcaption", "position 6")


def test_a_mask_that_leaks_says_so(page: Any, url: str) -> None:
    go(page, f"{url}#step=2")
    page.wait_for_selector(".verdict.holds")
    page.get_by_role("button", name="none", exact=True).click()
    page.wait_for_selector(".verdict.leaks")
    assert "29 earlier outputs moved" in page.locator(".verdict").inner_text()


def test_the_browsers_distribution_is_the_samplers(page: Any, url: str, explored: Explorer) -> None:
    go(page, url)
    trace = explored.get(None)
    logits = trace.part("next", position=9).arrays["logits"]
    for settings in (
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.0},
        {"temperature": 1.6, "top_k": 0, "top_p": 0.55, "min_p": 0.3},
        {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    ):
        sampling = lw.Sampling(**settings)
        bans = Bans.of(sampling, explored.model.tokenizer, len(logits), [])
        row = Row(sampling=sampling, ids=[1], n_prompt=1, draw=0.0, bans=bans)
        wanted = distribution(torch.tensor(logits), row)
        given = {"temperature": sampling.temperature, "k": sampling.top_k, "p": sampling.top_p, "minp": sampling.min_p}
        found = page.evaluate(
            """async ([logits, settings]) => {
              const { descending, distribution } = await import("leftward/numbers.js");
              return [...distribution(Float32Array.from(logits), descending(logits), settings)];
            }""",
            [logits.tolist(), given],
        )
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted, rtol=1e-4, atol=1e-6)


def test_the_browsers_order_is_a_stable_sort(page: Any, url: str) -> None:
    go(page, url)
    values = np.random.default_rng(1).normal(size=3000).astype(np.float32)
    values[::7] = values[3]
    values[5], values[6], values[8] = 0.0, -0.0, -3.4e38
    found = page.evaluate(
        """async (values) => [...(await import("leftward/numbers.js")).descending(values)]""", values.tolist()
    )
    bits = np.where(values == 0, np.where(np.signbit(values), -1e-45, 0), values)  # IEEE 754's total order: −0 < 0
    assert found == np.argsort(-bits, kind="stable").tolist()


def test_the_browsers_norms_and_entropies_are_the_seeds(page: Any, url: str) -> None:
    """The numbers of the seed document, as in test_trace.py."""
    go(page, url)
    found = page.evaluate(
        """async () => {
          const { entropy, mean, normalised, rms, std } = await import("leftward/numbers.js");
          const x = [4, -6, 1.5, 10.5, -2.5, 8, -4.5, 2];
          return [mean(x), std(x), rms(x), entropy([0.22, 0.26, 0.37, 0.15]), entropy([0.52, 0.48]),
                  ...normalised(x, "layernorm", 1e-5), ...normalised(x, "rmsnorm", 1e-5)];
        }"""
    )
    assert found[:5] == pytest.approx([1.625, 5.4529, 5.6899, 1.9271, 0.9988], abs=5.1e-5)
    assert found[5:13] == pytest.approx([0.44, -1.40, -0.02, 1.63, -0.76, 1.17, -1.12, 0.07], abs=0.0051)
    assert found[13:] == pytest.approx([0.703, -1.054, 0.264, 1.845, -0.439, 1.406, -0.791, 0.351], abs=5.1e-4)


def test_another_text_and_a_branch(browser: Any, url: str) -> None:
    for page in watched(browser, allowed=url, expected="status of 400"):
        go(page, f"{url}#step=5")
        page.locator("textarea").fill("the dog")
        page.keyboard.press("Enter")
        sync_api.expect(page.locator(".token:not(.written)")).to_have_count(8)
        page.locator('figure[data-figure="alternatives"] svg').wait_for()
        other = page.locator('figure[data-figure="alternatives"] g.row.pickable').first
        chosen = other.locator("text.name").inner_html()
        other.click()
        sync_api.expect(page.locator(".token:not(.written)")).to_have_count(9)
        assert page.locator('.token[data-position="8"]').inner_text() == chosen
        page.locator("textarea").fill("the " * 50)
        page.keyboard.press("Enter")
        says(page, ".prompt .note", "more than the 64 allowed here")


@pytest.mark.parametrize(("kind", "begins"), [("SVG", b"<svg"), ("PNG", b"\x89PNG"), ("CSV", b"query"), ("JSON", b"[")])
def test_files(page: Any, url: str, kind: str, begins: bytes) -> None:
    go(page, f"{url}#step=2")
    figure = page.locator('figure[data-figure="attention"]')
    figure.locator("svg").wait_for()
    figure.locator("summary").click()
    with page.expect_download() as download:
        figure.get_by_role("button", name=f"Save as {kind}" if kind in ("SVG", "PNG") else f"as {kind}").click()
    content = Path(download.value.path()).read_bytes()
    assert content.startswith(begins)
    if kind == "SVG":
        assert b"class=" not in content and b"var(" not in content


def test_a_report_from_a_file(browser: Any, tmp_path: Path) -> None:
    trace = lw.trace(small_model(), "the cat s", max_tokens=8, seed=1, name="small")
    trace.report(tmp_path / "report.html")
    address = (tmp_path / "report.html").as_uri()
    for page in watched(browser, allowed=address, offline=True):
        for number in range(1, 7):
            go(page, f"{address}#step={number}")
            check_step(page, number)
        page.wait_for_selector(".checks li.holds")
        assert page.locator(".checks li.holds").count() == 5
        go(page, f"{address}#step=4")
        slider = page.get_by_label("Position", exact=True)
        for position in (3, 13, 14):  # the lens has 12 columns
            slider.fill(str(position))
            says(page, "[data-figure=next-token] figcaption", f"position {position}")
            page.locator(f".lens td.here[data-column='{position % 12}']").first.wait_for()
            assert page.locator(".lens .here").count() == 5  # the heading, the embedding, and behind three layers
            says(page, "[data-figure=attribution] .not-here", "not in this report")  # but for the prompt's last
        go(page, f"{address}#step=2&mask=window&size=7&layer=1")
        page.locator(".not-here").first.wait_for()
        assert "leftward explore" in page.locator(".not-here").first.inner_text()


MARKUP = '<b onclick=x></b></script><script>document.title="run"</script><img src=x onerror=document.title="run">'
ODD = f"{MARKUP} é 🙂👩‍👩‍👧\n\t שלום \u202eabc\u0000"
SHAPES: dict[str, dict[str, Any]] = {
    "one of everything": {"n_layers": 1, "n_heads": 1, "d_model": 8, "positions": "none", "tie_embeddings": False},
    "mixture, parallel": {"n_experts": 4, "n_experts_per_token": 2, "d_shared": 12, "block": "parallel"},
    "post-norm, learned": {"block": "post", "norm": "layernorm", "norm_bias": True, "positions": "learned"},
    "sinks, windows": {"block": "sandwich", "attn_sinks": True, "attn_softcap": 2.0, "window": 3, "qkv_bias": True},
    "alibi, multi-query": {"block": "output", "positions": "alibi", "n_heads": 6, "d_model": 48, "n_kv_heads": 1},
    "sinusoidal": {
        "block": "parallel_shared",
        "positions": "sinusoidal",
        "feed_forward": "gelu",
        "norm_weight": "none",
    },
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("prompt", "max_tokens"), [(ODD, 3), ("", 0)], ids=["odd", "one token"])
def test_any_model_and_any_text(browser: Any, shape: str, prompt: str, max_tokens: int) -> None:
    """Every step shows every kind of model, and texts whose tokens are markup, bytes, or nothing but a beginning."""
    tokenizer = Tokenizer.train([MARKUP * 9], vocab_size=290)
    fields = {"n_layers": 2, "n_heads": 2, "d_model": 16, "max_seq_len": 256} | SHAPES[shape]
    model = LanguageModel(random_decoder(lw.Config(vocab_size=tokenizer.vocab_size, **fields)), tokenizer)
    made = Explorer(model, MARKUP)
    made.first(prompt, max_tokens=max_tokens, seed=1)
    with listening(made) as url:
        for page in watched(browser, allowed=url):
            go(page, url)
            for number, title in enumerate(STEPS, 1):
                page.keyboard.press(str(number))
                page.wait_for_load_state("networkidle")
                assert page.locator("main h1").inner_text() == f"{number}. {title}"
                for table in (False, True):
                    if table:
                        page.keyboard.press("t")
                    said = page.locator("main").text_content()
                    assert not re.search(r"\bNaN\b|undefined|Infinity|\bnull\b|\[object", said), said
                    assert page.locator(".not-here").count() == 0
            page.wait_for_selector(".checks li.holds")
            assert page.locator(".checks li.fails").count() == 0
            assert page.title() == "leftward" and page.locator("#page img, #page b, #page script").count() == 0


def test_a_long_text_does_not_freeze_the_page(browser: Any) -> None:
    """With 2,048 tokens a move of the query is answered within a second, whatever is still on its way."""
    made = Explorer(small_model(max_seq_len=2048), "long")
    made.first("the cat sat on the mat and " * 75, max_tokens=1, seed=1)
    with listening(made) as url:
        for page in watched(browser, allowed=url):
            go(page, f"{url}#step=2")
            page.locator('figure[data-figure="attention"] image').wait_for()
            page.keyboard.press("ArrowUp")
            page.locator('figure[data-figure="attention-row"] svg').wait_for(timeout=10_000)
            assert page.locator(".token").count() > 2000
