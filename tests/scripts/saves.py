"""Saves in the background and ends in one of many ways: `saves.py HOW`."""

import atexit
import os
import shutil
import signal
import sys
import threading

import torch

from flatout.frameworks.pytorch.seams.background_saves import BackgroundSaves

how = sys.argv[1]
torch.save("former", "a.pt")
atexit.register(print, "a handler")  # runs after ours
saves = BackgroundSaves()
saves.install()
sync, slow = os.fsync, threading.Event()


def fsync(file):
    slow.wait(1.0)
    sync(file)


os.fsync = fsync


def save(path="a.pt"):
    torch.save(torch.ones(1000), path)


if how == "fail":
    os.mkdir("gone")
    save("gone/a.pt")
    writer, saves._writer = saves._writer, None  # or removing the folder would wait
    shutil.rmtree("gone")
    saves._writer = writer
elif how == "thread":
    threading.Thread(target=lambda: (slow.wait(0.5), save())).start()
elif how == "handler":
    atexit.register(save)
elif how == "fork":
    save()
    if os.fork() == 0:
        print("in a child", flush=True)
        sys.exit(0)
    os.wait()
elif how == "kill":
    save()
    os.kill(os.getpid(), signal.SIGTERM)
else:
    save()
print("the end")
if how == "raise":
    raise ValueError("the script's own")
if how == "exit":
    sys.exit(3)
