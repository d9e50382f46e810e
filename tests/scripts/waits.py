"""Says that it is ready, then counts the signals that it gets, until it has been quiet for a while."""

import signal
import sys
import time

counted = []
names = sys.argv[1].split(",")
for name in names:
    signal.signal(getattr(signal, name), lambda number, frame: counted.append(signal.Signals(number).name))
print("ready", flush=True)
heard_s = time.monotonic() + 20
known = 0
while time.monotonic() < heard_s + 0.4:
    time.sleep(0.01)
    if len(counted) > known:
        known, heard_s = len(counted), time.monotonic()
print("got", counted)
