"""Takes the screenshots of the docs: `python docs/screenshots.py MODEL [PROMPT]` writes docs/screenshots/*.png.

Needs leftward's extra `explore`, playwright and chromium.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

SHOWN = {
    "mask": ("step=2&layer=11&head=4", "light"),
    "next-token": ("step=4&temperature=0.7&p=0.9", "light"),
    "generation": ("step=5&written=12", "dark"),
}
OUT = Path(__file__).parent / "screenshots"


def main(model: str, prompt: str = "The cat sat on the mat. The dog sat on the") -> None:
    OUT.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "leftward", "explore", model, prompt, "--seed", "1", "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stderr is not None
        url = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+/", line)))
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (address, scheme) in SHOWN.items():
            page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
            page.goto(f"{url}#{address}")
            page.wait_for_selector(".checks li.holds")
            page.screenshot(path=OUT / f"{name}.png")
        server.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:])
