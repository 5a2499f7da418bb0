"""`python watched.py FILE serve …`: the command with a watchdog in its event loop, which writes a line to FILE for each
turn that took longer than 20 ms: when it ended and how long it was.

A turn counts the processor time of the process where that is less than the wall time: what other programs of the
machine take is nobody's fault, and a thread that holds Python's lock shows in both.
"""

import sys
import time

import uvloop
from throughline.cli.main import main

TICK_S, TOLD_S = 0.004, 0.02
FILE = sys.argv.pop(1)
new_event_loop = uvloop.new_event_loop


def watched() -> uvloop.Loop:
    loop = new_event_loop()
    before = (time.monotonic(), time.process_time())

    def tick() -> None:
        nonlocal before
        now = (time.monotonic(), time.process_time())
        took_s = min(now[0] - before[0] - TICK_S, now[1] - before[1])
        if took_s > TOLD_S:
            with open(FILE, "a") as file:
                file.write(f"{now[0]} {took_s}\n")
            now = (time.monotonic(), time.process_time())
        before = now
        loop.call_later(TICK_S, tick)

    loop.call_later(1.0, tick)  # the imports of the first second are no answer to anybody
    return loop


uvloop.new_event_loop = watched
main()
