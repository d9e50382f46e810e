"""Trains on rows, in two loaders one after the other, and notes all it sees: `rows.py END`.

Everything is deterministic. Spawned children import this file again, so what costs time lies behind the guard.
"""

import atexit
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import warnings

import noting


def in_child(kind):
    print("in a child by", kind, os.environ.get("MARK"), sys.argv, flush=True)


if __name__ == "__main__":
    import numpy
    import torch
    from torch.utils.data import DataLoader, Dataset

    END = sys.argv[1]

    class Rows(Dataset):
        """Rows of an array; `noisy` ones draw random numbers."""

        def __init__(self, num, noisy=False):
            self.x = torch.arange(num * 4, dtype=torch.float32).reshape(num, 4).remainder(7) / 7
            self.y = self.x.sum(1, keepdim=True)
            self.noisy = noisy

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            x = self.x[index] * 2 - 1
            if self.noisy:
                x = x + torch.randn(4) * 0.01
            return x, self.y[index]

    class Model(torch.nn.Module):
        """The script's own class."""

        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Dropout(0.1),
                torch.nn.Linear(16, 1),
            )  # fmt: skip

        def forward(self, x):
            if x.sum() > 1e6:
                raise OverflowError("too large")
            return self.layers(x)

    def on_signal(number, frame):
        print("got", signal.Signals(number).name, "in", frame is not None, flush=True)

    def beat(stop):
        while not stop.wait(0.01):
            beats.append(threading.current_thread().name)

    def train(model, optimizer, loader, epochs):
        for epoch in range(epochs):
            model.train()
            for x, y in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.item())
            scheduler.step()
            model.eval()
            with torch.no_grad():
                model(loader.dataset.x)
            print("epoch", epoch, len(losses), scheduler.last_epoch, flush=True)
            logging.info("epoch %d", epoch)
            warnings.warn(f"a warning in epoch {epoch % 2}", stacklevel=1)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
            with open("log.csv", "a") as log:
                print(epoch, len(losses), sep=",", file=log)

    def end():
        if END == "raise":
            model(torch.full((2, 4), 1e7))
        elif END == "chained":
            try:
                model(torch.ones(2, 5))
            except RuntimeError as problem:
                raise ValueError("because of it") from problem
        elif END.startswith("SIG"):
            sys.stdout.flush()
            os.kill(os.getpid(), getattr(signal, END))
            time.sleep(10)
        elif END.isdigit():
            sys.exit(int(END))

    for word in ("first registered, last called", "last registered, first called"):
        atexit.register(print, word)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    signal.signal(signal.SIGUSR1, on_signal)
    signal.signal(signal.SIGALRM, on_signal)
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    os.environ["MARK"] = "set by the script"
    losses, beats, stop = [], [], threading.Event()
    beating = threading.Thread(target=beat, args=(stop,), name="beating", daemon=True)
    beating.start()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    loader = DataLoader(Rows(64), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(4))
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    train(model, optimizer, loader, 5)
    signal.setitimer(signal.ITIMER_REAL, 0)
    print("typed", repr(input("what? ")), repr(sys.stdin.readline()))
    os.kill(os.getpid(), signal.SIGUSR1)
    breakpoint()
    noting.surroundings("while")
    noting.framework("while")
    noting.objects("while", model, optimizer, loader)
    noting.bits("while", model, optimizer, losses)
    for kind in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(kind).Process(target=in_child, args=(kind,))
        process.start()
        process.join()
    pid = os.fork()
    if pid == 0:
        os._exit(5)
    print("forked", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    kept = torch.load("checkpoint.pt")
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    os.makedirs("further", exist_ok=True)
    noisy = DataLoader(Rows(48, noisy=True), batch_size=8, shuffle=True)
    train(model, optimizer, noisy, 3)
    stop.set()
    beating.join()
    print("beats", set(beats))
    noting.surroundings("after")
    noting.framework("after")
    noting.objects("after", model, optimizer, noisy)
    noting.bits("after", model, optimizer, losses)
    torch.save(model, "whole.pt")
    print("rest of stdin", repr(sys.stdin.read()))
    end()
