"""Run directories with made-up numbers, as a training would write them."""

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import torch

from modenorm.lab.report import Gallery
from modenorm.lab.report.gallery import Claim, LayerClaims, ModeClaims, tile_picture
from modenorm.lab.training import TrainConfig

PROVENANCE = {
    "device": "some device",
    "torch": "2.13.0",
    "modenorm": "0.1.0",
    "commit": "abc",
    "date": "2026-01-01",
}


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def fake_gallery(layers: int, count: int) -> Gallery:
    """A gallery of noise, which compresses worse than any photograph."""
    images = torch.randint(256, (2 * layers * count, 3, 32, 32), dtype=torch.uint8)

    def claims(start: int) -> ModeClaims:
        return ModeClaims(0.5, tuple(Claim(start + i, 0.9, "a", "b") for i in range(count)))

    found = tuple(
        LayerClaims(f"layer{i}", (claims(2 * i * count), claims((2 * i + 1) * count)))
        for i in range(layers)
    )
    return Gallery("noise", len(images), 32, found, tile_picture(images, 32))


def fake_metrics(
    config: TrainConfig, evaluations: int, layers: int, domains: bool
) -> list[dict[str, Any]]:
    rng = random.Random(config.run_id)
    records = []
    for place in range(1, evaluations + 1):
        error = 90 / place + rng.random()
        shares = [rng.random() for _ in range(config.modes)]
        shares = [round(share / sum(shares), 4) for share in shares]
        layer = {"shares": shares, "entropy": round(rng.random(), 4)}
        if domains:
            layer["by_domain"] = {"plain": shares[1:] + shares[:1], "odd": shares[::-1]}
        records.append(
            {
                "step": 10 * place,
                "samples": 1280 * place,
                "epoch": place,
                "lr": config.lr,
                "train_loss": 3 / place,
                "test_error": error,
                "top5_error": error / 5,
                "domain_errors": {"plain": error / 2, "odd": error * 1.5},
                "modes": {f"stage{i}.norm": layer for i in range(layers)}
                if config.norm in ("mn", "mgn")
                else {},
                "seconds": place,
            }
        )
    return records


def fake_run(
    folder: Path,
    evaluations: int = 5,
    layers: int = 2,
    done: bool = True,
    domains: bool = True,
    **settings: Any,
) -> Path:
    config = TrainConfig(**{"model": "lenet", "dataset": "builtin", **settings})
    path = folder / config.run_id
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    metrics = fake_metrics(config, evaluations, layers, domains)
    (path / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    if done:
        errors = [record["test_error"] for record in metrics]
        result = {
            "run": config.run_id,
            "final_error": errors[-1],
            "top_error": min(errors),
            "domain_errors": metrics[-1]["domain_errors"],
            "steps": metrics[-1]["step"],
            "seconds": 12.5,
            **PROVENANCE,
        }
        (path / "result.json").write_text(json.dumps(result))
        (path / "done").touch()
    return path


def page_data(html: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    return json.loads(found[1])


def text_of(html: str) -> str:
    """What a reader sees, without scripts."""
    html = re.sub(r"<script.*?</script>|<style.*?</style>", "", html, flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))
