"""Is an Explorer live in a real JupyterLab: continuous sliders that call the function itself, in Chromium?

Needs ``jupyter-lab`` on the PATH, beside this Python, or at NGPT_JUPYTER_LAB (it may live in another environment: the kernel is
this Python). Without it the test is skipped, or fails where NGPT_REQUIRE_BROWSER=1.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import test_browser
from selenium.webdriver import ActionChains

pytestmark = pytest.mark.browser
browser = test_browser.browser
ROOT = Path(__file__).parents[1]
CODE = """
from ngpt_book import Explorer, Slider
from ngpt_book.figures import gating

calls = []
def curves(a, eps_gate, kind):
    calls.append((a, eps_gate, kind))
    return gating.gate_curves(a if kind == "soft" else 1.0, eps_gate, 1e-14)

params = {
    "a": Slider([0.1, 0.3, 0.5, 1.0, 2.0], default=0.5),
    "eps_gate": Slider((1e-12, 1e-4, 5), default=1e-8, log=True),
    "kind": Slider(["soft", "hard"], default="soft"),
}
Explorer(curves, params, gating.gate_curves_figure, readout="a = {a}, gate {middle:.3f}", alt="The gate")
"""
RUN = "window.jupyterapp.commands.execute('notebook:run-all-cells')"
READOUT = "return document.querySelector('.jp-OutputArea .widget-html-content')?.textContent || ''"
CURVE = """const traces = [...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => [...(plot.data || [])]);
    const y = traces.find(trace => trace.name === 'GatedAdamW')?.y;
    return y ? Array.from(y._inputArray || y, Number) : null"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab whose folder holds one notebook; its kernel is this Python."""
    beside = Path(sys.executable).with_name("jupyter-lab")
    tool = os.environ.get("NGPT_JUPYTER_LAB") or (str(beside) if beside.exists() else shutil.which("jupyter-lab"))
    if not tool:
        test_browser._absent("This test needs JupyterLab: pip install jupyterlab, or its path in NGPT_JUPYTER_LAB.")
    folder = tmp_path_factory.mktemp("lab")
    cell = {"cell_type": "code", "id": "cell", "metadata": {}, "source": CODE, "outputs": [], "execution_count": None}
    kernel = {"name": "ours", "display_name": "ours", "language": "python"}
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": [cell]}
    (folder / "work").mkdir()
    (folder / "work" / "live.ipynb").write_text(json.dumps(notebook))
    (folder / "share" / "kernels" / "ours").mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "share" / "kernels" / "ours" / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "ours", "language": "python"})
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {key: value for key, value in os.environ.items() if key not in ("NGPT_BOOK", "VSCODE_PID")}
    env |= {
        "JUPYTER_PATH": f"{folder / 'share'}{os.pathsep}{Path(sys.prefix) / 'share' / 'jupyter'}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'book'}",
        **{f"JUPYTER_{kind}_DIR": str(folder / kind) for kind in ("CONFIG", "RUNTIME", "DATA")},
    }
    flags = ["--no-browser", "--allow-root", "--expose-app-in-browser", "--ip=127.0.0.1", f"--port={port}"]
    flags += ["--ServerApp.port_retries=0", "--IdentityProvider.token=", f"--ServerApp.root_dir={folder / 'work'}"]
    flags += ["--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([tool, *flags], cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + 60
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/api", timeout=5).close()
                    break
                except OSError:
                    assert server.poll() is None and time.monotonic() < end, (folder / "log").read_text()[-2000:]
                    time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/lab/tree/live.ipynb?reset"
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


def test_an_explorer_is_live_between_the_values_of_the_page(browser, lab):
    from ngpt_book.figures import gating

    browser.desktop()
    browser.driver.get(lab)
    browser.wait("return !!(window.jupyterapp && document.querySelector('.jp-Notebook .jp-CodeCell'))", 90)
    browser.wait("return !!document.querySelector('.jp-Notebook-ExecutionIndicator[data-status=idle]')", 60)
    time.sleep(5)  # the kernel reports idle before the notebook listens to it
    browser.js(f"{RUN}; return 0")
    browser.wait("return document.querySelectorAll('.jp-OutputArea .noUi-handle').length === 2", 120)
    browser.wait("return !!document.querySelector('.jp-OutputArea .js-plotly-plot .main-svg')", 60)
    first = browser.wait(READOUT, 30)
    assert first.startswith("a = 0.5, gate")

    handles = browser.find(".jp-OutputArea .noUi-handle")
    browser.js("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", handles[0])
    ActionChains(browser.driver).click_and_hold(handles[0]).move_by_offset(12, 0).release().perform()
    browser.wait(f"return ({{f() {{ {READOUT} }}}}).f() !== arguments[0]", 60, first)
    browser.wait("return document.querySelector('.widget-readout').textContent !== '0.500'", 10)
    time.sleep(1)  # the last of the moves
    after = browser.js(READOUT)
    a = float(after.split("a = ")[1].split(",")[0])
    assert 0.5 < a < 0.7 and a not in (0.1, 0.3, 0.5, 1.0, 2.0)  # between two values of the page
    got, step = browser.wait(CURVE, 30), 0.4 / 84
    want = [gating.gate_curves(0.5 + k * step, 1e-8, 1e-14)["gate"].numpy() for k in range(1, 43)]
    assert min(float(abs(w - got).max()) for w in want) < 1e-6  # what the function returns there, not an interpolation

    (hard,) = [button for button in browser.find(".jp-OutputArea .widget-toggle-button") if button.text == "hard"]
    hard.click()  # a choice is a button here too
    browser.wait(f"return ({{f() {{ {READOUT} }}}}).f() !== arguments[0]", 60, after)
    time.sleep(0.5)
    assert abs(gating.gate_curves(1.0, 1e-8, 1e-14)["gate"].numpy() - browser.wait(CURVE, 30)).max() < 1e-6
    (reset,) = [button for button in browser.find(".jp-OutputArea button") if button.text == "Reset"]
    reset.click()
    browser.wait(f"return ({{f() {{ {READOUT} }}}}).f() === arguments[0]", 60, first)
