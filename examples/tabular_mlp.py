"""Train a small MLP on a table: many tiny steps, validated after every epoch."""

import argparse
import random

import numpy as np
import torch
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def load_data(num_samples, seed):
    X, y = make_classification(
        n_samples=num_samples, n_features=20, n_informative=10, n_clusters_per_class=4, flip_y=0.02, random_state=seed
    )
    X_train, X_val, y_train, y_val = train_test_split(X, y, test_size=0.2, random_state=seed, stratify=y)
    scaler = StandardScaler().fit(X_train)
    train_set = TensorDataset(
        torch.tensor(scaler.transform(X_train), dtype=torch.float32), torch.tensor(y_train, dtype=torch.float32)
    )
    val_set = TensorDataset(
        torch.tensor(scaler.transform(X_val), dtype=torch.float32), torch.tensor(y_val, dtype=torch.float32)
    )
    return train_set, val_set


class MLP(nn.Module):
    def __init__(self, num_features, hidden):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(num_features, hidden),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(1)


def train_one_epoch(model, loader, criterion, optimizer, device):
    model.train()
    total_loss = 0.0
    for X, y in loader:
        X, y = X.to(device), y.to(device)
        optimizer.zero_grad()
        loss = criterion(model(X), y)
        loss.backward()
        optimizer.step()
        total_loss += loss.item() * len(y)
    return total_loss / len(loader.dataset)


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    correct = 0
    for X, y in loader:
        X, y = X.to(device), y.to(device)
        correct += ((model(X) > 0) == (y > 0.5)).sum().item()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description="a small MLP on tabular data")
    parser.add_argument("--samples", type=int, default=20000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device(args.device)

    train_set, val_set = load_data(args.samples, args.seed)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=args.batch_size)

    model = MLP(train_set.tensors[0].shape[1], args.hidden).to(device)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        loss = train_one_epoch(model, train_loader, criterion, optimizer, device)
        acc = validate(model, val_loader, device)
        print(f"epoch {epoch + 1}/{args.epochs} loss {loss:.4f} val_accuracy {acc:.4f}")


if __name__ == "__main__":
    main()
