"""A script that trains in many ways one after the other; prints what each of them ended with."""

import copy
import hashlib
import io
import pickle
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def bits(*modules):
    data = b"".join(p.detach().numpy().tobytes() for m in modules for p in m.parameters())
    return hashlib.sha256(data).hexdigest()[:16]


def net(out=2):
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, out))


def simple():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    averaged = copy.deepcopy(model)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for p, q in zip(averaged.parameters(), model.parameters(), strict=True):
                p.lerp_(q, 0.1)
    model.eval()
    with torch.no_grad():
        print("simple", bits(model, averaged), f"{model(torch.ones(1, 4)).sum().item():.6f}", schedule.get_last_lr())
    return model, optimizer


def resumed(model, optimizer):
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    checkpoint = torch.load(file)
    print("keys", list(checkpoint["model"])[:2], sorted(checkpoint["optimizer"]["param_groups"][0]))
    again = net()
    again.load_state_dict(checkpoint["model"])
    other = torch.optim.AdamW(again.parameters())
    other.load_state_dict(checkpoint["optimizer"])
    again(torch.ones(6, 4)).sum().backward()
    other.step()
    pickled = pickle.dumps(model)  # its length varies with interned strings
    attributes = sorted({name for module in pickle.loads(pickled).modules() for name in vars(module)})
    print("resumed", bits(again), b"flatout" in pickled, attributes)


def gan():
    judge, maker = net(1), net(4)
    optimizers = [torch.optim.Adam(m.parameters(), betas=(0.5, 0.9)) for m in (judge, maker)]
    for _ in range(8):
        fake = maker(torch.randn(6, 4))
        optimizers[0].zero_grad()
        (judge(fake.detach()).mean() - judge(torch.randn(6, 4)).mean()).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        judge(fake).mean().neg().backward()
        optimizers[1].step()
    print("gan", bits(judge, maker))


def closure():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(8, 4)

    def evaluate():
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(evaluate)
    print("closure", bits(model))


def by_hand():
    model = nn.Linear(4, 2)
    loader = DataLoader(TensorDataset(torch.randn(60, 4)), batch_size=2, shuffle=True)
    for (x,) in loader:
        for p, g in zip(
            model.parameters(), torch.autograd.grad(model(x).pow(2).mean(), model.parameters()), strict=True
        ):
            p.data -= 0.1 * g
    print("by hand", bits(model))


def in_a_thread():
    threading.Thread(target=simple).start()
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    resumed(*simple())
    gan()
    closure()
    by_hand()
    in_a_thread()
    for fold in range(3):
        torch.manual_seed(fold)
        simple()
    print("random", torch.rand(1).item())


if __name__ == "__main__":
    main()
