"""Getting the published files: checked by their checksums, continued where a try broke off."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modenorm.lab.data.catalog import PUBLISHED
from modenorm.lab.data.files import md5
from modenorm.lab.data.sets import DataError

Report = Callable[[str, int, int], None]  # file name, bytes so far, bytes in all (0: not known)
TIMEOUT = 30
TRIES = 3


def download(name: str, root: Path, report: Report, force: bool = False) -> list[Path]:
    """Get the files of one data set that are not there yet.

    Args:
        name: Data set.
        root: Data folder.
        report: Called with the progress of each file.
        force: Replace files that are there and are not the published ones.
    """
    if name not in PUBLISHED:
        raise DataError(f"cannot download {name!r}: expected one of {', '.join(PUBLISHED)}")
    published = PUBLISHED[name]
    paths = []
    for place, checksum in published.downloads.items():
        path = root / place
        if path.exists() and not force and md5(path) != checksum:
            raise DataError(
                f"{path}: md5 {md5(path)}, expected {checksum} as published; --force replaces it"
            )
        _fetch(published.address + path.name, path, checksum, report)
        paths.append(path)
    return paths


def _fetch(url: str, path: Path, checksum: str, report: Report) -> None:
    try:
        import pooch
        import requests
    except ModuleNotFoundError as missing:
        raise DataError(f"downloads need {missing.name!r}: pip install 'modenorm[lab]'") from None
    pooch.get_logger().setLevel("ERROR")
    client = pooch.create(
        path=path.parent,
        base_url="",
        registry={path.name: f"md5:{checksum}"},
        urls={path.name: url},
        retry_if_failed=TRIES - 1,
    )
    try:
        client.fetch(path.name, downloader=_Resumed(path, report))
    except requests.RequestException as error:
        reason = type(error).__name__
        raise DataError(
            f"{path}: cannot get {url} ({reason}); check the network, or put the file there by hand"
        ) from error
    except ValueError as error:
        raise DataError(f"{path}: {url} has another md5, expected {checksum}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error})") from error


class _Resumed:
    """A downloader for pooch that keeps what it got in NAME.part and asks for the rest."""

    def __init__(self, path: Path, report: Report) -> None:
        self.part = path.with_name(f"{path.name}.part")
        self.name = path.name
        self.report = report

    def __call__(self, url: str, output_file: Any, pooch: object) -> None:
        import requests

        have = self.part.stat().st_size if self.part.exists() else 0
        headers = {"Range": f"bytes={have}-"} if have else {}
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
            if response.status_code == 416:  # the part is complete or longer than the file
                os.replace(self.part, output_file)
                return
            response.raise_for_status()
            if response.status_code != 206:
                have = 0
            self._save(response, have)
        os.replace(self.part, output_file)

    def _save(self, response: Any, have: int) -> None:
        length = int(response.headers.get("content-length", 0))
        total = have + length if length else 0
        with self.part.open("ab" if have else "wb") as stream:
            for chunk in response.iter_content(1 << 16):
                have += stream.write(chunk)
                self.report(self.name, have, total)
