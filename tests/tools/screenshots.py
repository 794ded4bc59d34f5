#!/usr/bin/python3
"""Makes the screenshots of the documents: a cluster of two nodes under a small load, seen by headless Chromium.

Usage: screenshots.py FOLDER
"""
import os
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cluster"))
from browser import Browser  # noqa: E402
from local_cluster import Cluster  # noqa: E402

SECONDS = 60  # of load before the first picture


def load(cluster, k, over):
    """Conversations of five turns, each the last one's prompt and more: most of a prompt is in the cache."""
    turn = 0
    while not over.is_set():
        turn += 1
        prompt = f"{k}{turn // 5} ROMEO: what is love? " + "speak again, bright angel. " * (20 + 25 * (turn % 5))
        cluster.complete(prompt, 24 + 40 * (turn % 4), ignore_eos=True)
        over.wait(0.25)


def picture(page, folder, name):
    path = os.path.join(folder, name + ".png")
    page.screenshot(path)
    size = os.path.getsize(path)
    print(f"{path}: {size} bytes")
    assert size < 200_000, f"{path} is too large for a document"


def main(folder):
    os.makedirs(folder, exist_ok=True)
    over = threading.Event()
    cluster = Cluster("--set", "conductor.sched.ttft_objective_ms=200", "--set", "conductor.sched.tbt_objective_ms=20")
    clients = [threading.Thread(target=load, args=(cluster, k, over)) for k in "ab"]
    page = None
    try:
        for c in clients:
            c.start()
        time.sleep(SECONDS)
        page = Browser()
        page.size(1200, 560)
        page.open(cluster.url + "/ui#cluster")
        page.wait("document.querySelectorAll('.member').length >= 5")
        time.sleep(2)
        picture(page, folder, "cluster")
        page.size(1200, 560, dark=True)
        page.open(cluster.url + "/ui#requests")
        page.wait("document.querySelectorAll('a.row:not(.open)').length > 20")
        page.eval("[...document.querySelectorAll('a.row:not(.open)')][6].click()")
        page.wait("document.querySelector('.detail table')")
        picture(page, folder, "requests")
        page.size(1200, 720)
        page.eval("location.hash = 'goodput'")
        page.wait("document.querySelectorAll('.chart').length === 6")
        time.sleep(1)
        picture(page, folder, "goodput")
        page.size(1000, 560)
        page.eval("location.hash = 'chat'")
        page.wait("document.querySelector('#chat-text')")
        page.click("#chat-text")
        page.type("JULIET: What light through yonder window breaks?")
        page.key("Enter", 13, "\r")
        page.wait("document.querySelector('.numbers')?.innerText.includes('generated')")
        page.click(".strip .token:nth-of-type(4)")
        page.wait("document.querySelector('.others')")
        picture(page, folder, "chat")
        assert page.problems == [], page.problems
    finally:
        over.set()
        for c in clients:
            c.join()
        if page:
            page.close()
        cluster.stop()


if len(sys.argv) != 2:
    sys.exit(__doc__.strip())
main(sys.argv[1])
