"""Tries the gateway's page in a browser without a screen: page.py URL CHROMIUM CHROMEDRIVER.

What a listener would see is asserted here; what came of it on the other side is the caller's to check. Says as JSON
what it saw.
"""

import json
import os
import sys
import tempfile

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

SHORT = "The ferry leaves the harbor at six."
LONG = " ".join([SHORT, "She kept the old map folded in her coat.", "It is late, and the rain has not stopped."] * 3)


class Page:
    def __init__(self, driver):
        self.driver = driver

    def text(self, name):
        return self.driver.find_element(By.ID, name).text

    def until(self, what, true):
        message = lambda: f"{what} did not happen: {self.driver.find_element(By.TAG_NAME, 'body').text}"
        wait = WebDriverWait(self.driver, 60, poll_frequency=0.05)
        try:
            return wait.until(lambda _: true())
        except Exception as error:
            raise AssertionError(message()) from error

    def state(self):
        return self.driver.find_element(By.TAG_NAME, "body").get_attribute("data-state")

    def chunks(self):
        return int(self.text("chunks")) if self.text("chunks").isdigit() else 0

    def ready(self):
        speak = self.driver.find_element(By.ID, "speak")
        self.until("the page is ready", speak.is_enabled)

    def speak(self, text):
        field = self.driver.find_element(By.ID, "text")
        field.clear()
        field.send_keys(text)
        self.driver.find_element(By.ID, "speak").click()

    def lanes(self):
        # At once: the page puts new cells in the place of old ones while it is looked at.
        script = "return [...document.querySelectorAll('#lanes > *')].map(cell => [cell.innerText, cell.value])"
        cells = self.driver.execute_script(script)
        return [(cells[i][0], float(cells[i + 1][1])) for i in range(0, len(cells), 3)]


def hears_a_stream(page):
    page.ready()
    voices = [option.text for option in Select(page.driver.find_element(By.ID, "voice")).options]
    page.speak(LONG)
    # Chunks come while more is being made, and what came is played meanwhile.
    page.until("a chunk", lambda: page.chunks() >= 1)
    seen = page.chunks()
    page.until("another chunk", lambda: page.chunks() > seen)
    assert page.state() == "speaking", page.state()
    page.until("the play clock moves", lambda: page.driver.execute_script("return audio.currentTime > 0.2"))
    busy = page.until("a lane is busy", lambda: [lane for lane in page.lanes() if lane[1] > 0])
    page.until("the end", lambda: page.state() == "done")
    assert page.text("error") == "", page.text("error")
    for figure in ["ttfa", "sound", "rate", "gaps"]:
        assert page.text(figure) not in ("", "–"), figure
    for path in ["received", "played"]:
        assert len(page.driver.find_element(By.ID, path).get_attribute("d")) > 10, path
    played = page.driver.execute_script("return running.playAt - audio.currentTime")
    page.until("all of it is played", lambda: page.driver.execute_script("return running.sources.size === 0"))
    return {
        "voices": voices,
        "busy": busy,
        "lanes": [name for name, _ in page.lanes()],
        "chunks": page.chunks(),
        "seconds": float(page.text("sound").split()[0]),
        "left_to_play_at_the_end": played,
    }


def survives_a_reload(page):
    page.speak(LONG)
    page.until("a chunk", lambda: page.chunks() >= 1)
    assert page.state() == "speaking", page.state()
    page.driver.refresh()
    page.ready()
    assert page.chunks() == 0
    page.speak(SHORT)
    page.until("the end", lambda: page.state() == "done")
    assert page.chunks() >= 1 and page.text("error") == ""


def tells_what_is_wrong(page):
    page.speak("…")
    page.until("a refusal", lambda: page.state() == "failed")
    return page.text("error")


def main(url, chromium, chromedriver):
    options = Options()
    options.binary_location = chromium
    for argument in ["--headless=new", "--disable-gpu", "--autoplay-policy=no-user-gesture-required"]:
        options.add_argument(argument)
    if os.geteuid() == 0:
        # Its sandbox refuses to run as root. Nothing but this page is opened.
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory() as profile:
        options.add_argument(f"--user-data-dir={profile}")
        driver = webdriver.Chrome(options=options, service=Service(executable_path=chromedriver))
        try:
            driver.get(url)
            page = Page(driver)
            said = hears_a_stream(page)
            survives_a_reload(page)
            said["refused"] = tells_what_is_wrong(page)
            # The refusal is an answer with status 400, which the browser notes.
            noted = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
            said["noted"] = [message for message in noted if "400" not in message]
        finally:
            driver.quit()
    json.dump(said, sys.stdout)


main(*sys.argv[1:])
