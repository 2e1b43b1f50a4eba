"""Who turns a page into paper or a picture? The Chromium of this machine, without a window and without a network."""

import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars
    --allow-file-access-from-files""".split()


class NotFound(Exception):
    """There is no Chromium on this machine."""


def _run(page: Path, *flags: str, seconds: float) -> None:
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        raise NotFound(
            "Chromium prints pages and takes pictures of them, and was not found. On Debian or Ubuntu: apt-get install chromium"
        )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:  # it may still be writing
        command = [program, *FLAGS, f"--user-data-dir={profile}", *flags, page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=seconds)


def pdf(page: Path, target: Path, seconds: float = 600) -> None:
    """Print a page. Its headings become the outline; headers and footers are the style sheet's (``@page``)."""
    _run(page, f"--print-to-pdf={target}", "--no-pdf-header-footer", "--generate-pdf-document-outline", seconds=seconds)


def png(page: Path, target: Path, width: int, height: int, scale: float = 1, seconds: float = 120) -> None:
    """Take a picture of a page."""
    size = f"--window-size={width},{height}"
    _run(page, f"--screenshot={target}", size, f"--force-device-scale-factor={scale:g}", seconds=seconds)
