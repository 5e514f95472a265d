"""The page in a real browser: no error on its console, and the controls work, also by keyboard.

Needs the package playwright and a Chromium that is installed (make test-browser gets both).
"""

import json
from pathlib import Path

import pytest
import torch
from fake_runs import fake_run, read_lines
from torch import nn

import modenorm
from modenorm.lab.data import ImageSet
from modenorm.lab.report import Page, make_gallery, read_records, write_page

BENCH = Path(__file__).parents[3] / "results" / "bench_layer.jsonl"
EVIL = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(2):
        fake_run(folder, norm="bn", seed=seed)
        path = fake_run(folder, norm="mn", modes=3, seed=seed)
    fake_run(folder, norm="bn", dataset="a-set", evaluations=0, done=False)  # has just begun
    between(fake_run(folder, norm="bn", model="resnet20", dataset="cifar10"))
    fake_run(
        folder,
        norm="mn",
        model="resnet18",
        dataset="folder:a-name-wider-than-a-phone-is",
        domains=False,
    )
    gallery().save(path)
    metrics = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(metrics.replace("stage1.norm", json.dumps(EVIL)[1:-1]))
    (folder / "broken").mkdir()
    return folder


def between(path):
    """Give a run errors that Python rounds to 45.12, and JavaScript to 45.13."""
    result = json.loads((path / "result.json").read_text())
    errors = {"final_error": 45.125, "domain_errors": {"plain": 45.125, "odd": 50.0}}
    (path / "result.json").write_text(json.dumps(result | errors))


def gallery():
    model = nn.Sequential(modenorm.ModeNorm2d(3, 3), nn.Conv2d(3, 8, 3), modenorm.ModeNorm2d(8, 2))
    pixels = torch.randint(256, (40, 3, 16, 16), dtype=torch.uint8)
    zeros = torch.zeros(40, dtype=torch.long)
    images = ImageSet(pixels, zeros, zeros, (EVIL,), ("noise",))
    return make_gallery(model.eval(), images, "noise", ((128,) * 3, (64,) * 3), count=10)[0]


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    """The page's file."""
    folder = tmp_path_factory.mktemp("page")
    rows = [{"what": "word" * 50, "always": "0123456789abcdef" * 10, "us": us} for us in (1, 2)]
    (folder / "bench.jsonl").write_text("\n".join(map(json.dumps, rows)))
    page = Page(results=[folder / "bench.jsonl", BENCH])
    write_page(folder / "page.html", read_records([runs]), page)
    return folder / "page.html"


@pytest.fixture
def page(request, browser, written):
    """The page, opened without a network; complaints of the console fail the test."""
    kind = getattr(request, "param", "desktop")
    context = browser.new_context(
        viewport={"width": 390 if kind == "phone" else 1280, "height": 844},
        color_scheme="dark" if kind == "dark" else "light",
        offline=True,
    )
    opened, complaints = context.new_page(), []
    opened.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto(written.as_uri())
    opened.wait_for_selector("html[data-ready]")
    yield opened
    assert complaints == []
    assert opened.title() == "Mode normalization: report"  # nothing from the files was run
    context.close()


@pytest.mark.parametrize("page", ["desktop", "phone", "dark"], indirect=True)
def test_everything_is_drawn_and_nothing_runs_over_the_edge(page):
    charts = page.locator(".chart .main-svg")
    assert charts.count() >= 5
    for chart in page.locator(".chart:visible").all():
        assert chart.get_attribute("role") == "img"
        assert len(chart.get_attribute("aria-label")) > 20
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator("#problems li").count() == 1
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, colour[4:-1].split(","))) < 150) == dark


def test_numbers_on_the_page_equal_the_run_files(page, runs):
    row = page.locator("#results tr", has_text="MN K=3")
    results = [json.loads(file.read_text()) for file in runs.glob("*mn3*/result.json")]
    mean = sum(result["final_error"] for result in results) / len(results)
    assert row.locator("td").first.inner_text().startswith(f"{mean:.2f}")
    drawn = page.evaluate("document.getElementById('curves-chart').data.map((t) => t.y.at(-1))")
    files = runs.glob("lenet*/result.json")
    expected = sorted(json.loads(file.read_text())["final_error"] for file in files)
    assert sorted(drawn) == pytest.approx(expected, abs=1e-3)


def test_a_number_is_the_same_everywhere(page):
    page.select_option("#experiment", label="resnet20 on cifar10")
    for place in ("#curves-text", "#domains-text", "#domains-table"):
        assert "45.12" in page.locator(place).text_content()
    (drawn,) = page.evaluate("document.getElementById('domains-chart').data")
    assert (drawn["y"], drawn["customdata"]) == ([45.125, 50], ["45.12", "50.00"])
    assert "45.13" not in page.locator("main").text_content()
    assert page.locator("#results tr", has_text="45.12").count() > 0


def test_experiment_measure_and_scale(page):
    page.select_option("#experiment", label="resnet20 on cifar10")
    assert page.locator("#curves-name").inner_text() == "Test error, resnet20 on cifar10"
    assert page.evaluate("document.getElementById('curves-chart').data.length") == 1
    page.select_option("#measure", "train_loss")
    page.select_option("#scale", "log")
    assert "Training loss" in page.locator("#curves-name").inner_text()
    kind = page.evaluate("document.getElementById('curves-chart').layout.yaxis.type")
    assert kind == "log"


def test_mode_sliders_by_keyboard(page):
    page.focus("#modes-layer")
    assert page.locator("#modes-layer-name").inner_text() == "stage0.norm"
    page.keyboard.press("ArrowRight")
    assert page.locator("#modes-layer-name").inner_text() == "stage1.norm"
    assert "stage1.norm" in page.locator("#shares-name").inner_text()
    page.select_option("#modes-run", index=1)  # its second layer has an evil name
    assert page.locator("#modes-layer-name").inner_text() == EVIL


def in_percent(evaluations):
    """The shares of every mode over the evaluations, with one digit."""
    return [
        [pytest.approx(100 * share, abs=0.051) for share in mode]
        for mode in zip(*evaluations, strict=True)
    ]


def test_who_uses_which_mode_over_training_by_keyboard(page, runs):
    def drawn():
        return page.evaluate("document.getElementById('shares-chart').data.map((t) => t.y)")

    (path,) = runs.glob("lenet-builtin-mn3-*-s1-*")
    layers = [line["modes"]["stage0.norm"] for line in read_lines(path / "metrics.jsonl")]
    page.select_option("#modes-run", index=1)
    assert drawn() == in_percent(layer["shares"] for layer in layers)
    page.focus("#modes-domain")
    for domain in ("plain", "odd"):
        page.keyboard.press("ArrowDown")
        assert drawn() == in_percent(layer["by_domain"][domain] for layer in layers)
        assert page.locator("#shares-name").inner_text().endswith(f"stage0.norm, {domain} alone")
        unit = page.evaluate("document.getElementById('shares-chart').layout.yaxis.title.text")
        assert unit == "share of the domain's test images (%)"
    last = f"{drawn()[0][-1]:.1f}"
    assert f"mode 0 {last}\xa0%" in page.locator("#shares-chart").get_attribute("aria-label")
    assert page.locator("#shares-table tr").last.locator("td").first.text_content() == last
    page.select_option("#modes-run", index=0)  # the choice is kept
    assert page.locator("#shares-name").inner_text().endswith("odd alone")


def test_without_domains_there_is_no_choice_of_them(page):
    assert page.locator("#modes-domain").is_visible()
    page.select_option("#modes-domain", "odd")
    page.select_option("#modes-run", index=2)
    assert page.locator("#modes-domain").is_hidden()
    assert "odd" not in page.locator("#shares-name").inner_text()


def test_gallery_sliders_by_keyboard(page):
    assert page.locator("#tiles h4").count() == 3
    assert page.locator(".tile").count() == 30
    page.focus("#gallery-mode")
    page.keyboard.press("ArrowRight")
    assert page.locator("#tiles h4").count() == 1
    assert page.locator("#gallery-mode-name").inner_text() == "mode 0"
    page.keyboard.press("End")
    assert page.locator("#tiles h4").inner_text().startswith("Mode 2: share ")
    page.focus("#gallery-layer")
    page.keyboard.press("ArrowRight")
    assert page.locator("#gallery-layer-name").inner_text() == "2"
    assert page.locator("#gallery-mode-name").inner_text() == "mode 1"  # this layer has two
    label = page.locator(".tile i").first.get_attribute("aria-label")
    assert label.startswith(EVIL)


@pytest.mark.parametrize("page", ["desktop", "phone"], indirect=True)
def test_benchmark_tables(page):
    row = next(row for row in read_lines(BENCH) if row["norm"] == "bn")
    layer = page.locator(".benchmark", has_text="floor µs")
    assert layer.locator("tbody tr").first.locator("td").nth(1).inner_text() == (
        f"{row['device_us']:.0f}"
    )
    summary = page.locator("summary", has_text="as measured")
    rows = page.locator("details", has=summary).locator("table")
    assert rows.is_hidden()
    summary.focus()
    page.keyboard.press("Enter")
    assert rows.locator("tbody tr").count() == len(read_lines(BENCH))
    assert rows.is_visible()
    x, y = layer.evaluate(
        """(box) => {
            box.scrollTo(200, 200);
            const outer = box.getBoundingClientRect();
            const corner = box.querySelector("th").getBoundingClientRect();
            return [corner.x - outer.x, corner.y - outer.y];
        }"""
    )
    assert abs(x) + abs(y) < 2  # the names of rows and columns stay in view


def test_every_control_can_be_reached_by_tab(page):
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    controls = page.evaluate("[...document.querySelectorAll('select, input')].map((e) => e.id)")
    assert set(controls) <= reached
