"""How heavy is a page of the book, and how soon does its first Explorer respond?

    python benchmarks/page.py _build/html [PAGE ...] [--rounds 3]

Serves the built site with gzip, as any host does, and opens each page in headless Chromium: once as a desktop (10 Mbit/s,
40 ms) and once as a slow phone (1.6 Mbit/s, 150 ms, CPU / 4, 390 x 844). Before any input: bytes that crossed the
wire and the layout shift. Then the reader goes straight to the first Explorer: seconds from the click on the link until it is
drawn and its sliders work. Times are wall times (a browser has no others) and need a quiet machine; the bytes do not.
"""

import argparse
import functools
import gzip
import http.server
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import ClassVar

from selenium import webdriver

FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync
    --disable-component-update --disable-dev-shm-usage --enable-unsafe-swiftshader --hide-scrollbars""".split()
MACHINES = {  # Mbit/s, latency in ms, CPU slowdown, width, height, mobile
    "desktop": (10, 40, 1, 1200, 1000, False),
    "slow phone": (1.6, 150, 4, 390, 844, True),
}
WATCH = """
window.seen = { shift: 0, alive: 0 };
new PerformanceObserver((list) => list.getEntries().forEach((e) => { if (!e.hadRecentInput) seen.shift += e.value; }))
  .observe({ type: "layout-shift", buffered: true });
const alive = setInterval(() => {
  const first = document.querySelector(".ngx[data-kind=explorer]");
  if (!first) return;
  if (GO) first.scrollIntoView({ block: "center", behavior: "instant" });
  if (first.dataset.state !== "live" || !first.querySelector(".ngx-plot .main-svg")) return;
  seen.alive = performance.now() / 1000;
  clearInterval(alive);
}, 20);
"""
IDLE = 3.0  # seconds without a request: everything that wanted to load by itself has loaded


class Zipped(http.server.SimpleHTTPRequestHandler):
    """Static files with gzip; counts the bytes that it sends."""

    sent: ClassVar[list[tuple[str, int]]] = []

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        body = (
            _zipped(path) if (text := path.suffix in (".html", ".js", ".css", ".svg", ".json", ".map")) else path.read_bytes()
        )
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(str(path)))
        self.send_header("Content-Length", str(len(body)))
        if text:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(body)
        self.sent.append((self.path, len(body)))

    def log_message(self, *_: object) -> None:
        pass


@functools.cache
def _zipped(path: Path) -> bytes:
    return gzip.compress(path.read_bytes(), 6)


def visit(address: str, machine: str, go: bool) -> dict:
    """One cold visit with a fresh profile. ``go``: straight to the first Explorer."""
    mbit, latency, slow, width, height, mobile = MACHINES[machine]
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            driver.execute_cdp_cmd("Network.enable", {})
            speed = mbit * 1e6 / 8
            line = {"offline": False, "latency": latency, "downloadThroughput": speed, "uploadThroughput": speed}
            driver.execute_cdp_cmd("Network.emulateNetworkConditions", line)
            driver.execute_cdp_cmd("Emulation.setCPUThrottlingRate", {"rate": slow})
            watch = WATCH.replace("GO", "true" if go else "false")
            driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": f"{{{watch}}}"})
            Zipped.sent.clear()
            driver.get(address)
            last, count, end = time.monotonic(), 0, time.monotonic() + 120
            while time.monotonic() < end:
                seen = driver.execute_script("return window.seen")
                if len(Zipped.sent) != count:
                    last, count = time.monotonic(), len(Zipped.sent)
                if (seen["alive"] or not go) and time.monotonic() - last > IDLE:
                    break
                time.sleep(0.1)
            return {**driver.execute_script("return window.seen"), "sent": list(Zipped.sent)}
        finally:
            driver.quit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("pages", nargs="*", default=["01_hypersphere", "04_log_decay"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--list", action="store_true", help="print what was transferred, file by file")
    given = parser.parse_args()
    handler = functools.partial(Zipped, directory=str(given.site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"{'page':24s} {'machine':12s} {'kB, idle':>9s} {'shift':>6s} {'kB, to it':>9s} {'alive, s (median; all)':>24s}")
        for page in given.pages:
            address = f"http://127.0.0.1:{server.server_port}/{page}.html"
            for machine in MACHINES:
                idle = visit(address, machine, go=False)
                runs = [visit(address, machine, go=True) for _ in range(given.rounds)]
                times = sorted(run["alive"] for run in runs)
                weights = [sum(n for _, n in sent) / 1e3 for sent in (idle["sent"], runs[0]["sent"])]
                every = " ".join(f"{t:.1f}" for t in times)
                print(
                    f"{page:24s} {machine:12s} {weights[0]:9.0f} {idle['shift']:6.3f} {weights[1]:9.0f} "
                    f"{statistics.median(times):10.1f}; {every}",
                    flush=True,
                )
                if given.list:
                    print("\n".join(f"    {n / 1e3:9.1f}  {path}" for path, n in sorted(idle["sent"], key=lambda x: -x[1])))
        server.shutdown()


if __name__ == "__main__":
    main()
