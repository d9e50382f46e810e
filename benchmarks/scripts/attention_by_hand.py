"""A GPT whose attention is written by hand, as nanoGPT's slow path and minGPT's are; tokens are random.

Typed as `flatout tune attention_by_hand.py --tokens 512 --levers fused_attention`.
"""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--tokens", type=int, default=256)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--width", type=int, default=192)
parser.add_argument("--heads", type=int, default=6)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument("--vocabulary", type=int, default=256)
args = parser.parse_args()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(args.width, 3 * args.width), nn.Linear(args.width, args.width)
        self.dropout = nn.Dropout(args.dropout)
        self.register_buffer("bias", torch.ones(args.tokens, args.tokens).tril().view(1, 1, args.tokens, args.tokens))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.qkv(x).split(C, dim=2)
        k = k.view(B, T, args.heads, C // args.heads).transpose(1, 2)
        q = q.view(B, T, args.heads, C // args.heads).transpose(1, 2)
        v = v.view(B, T, args.heads, C // args.heads).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.dropout(att)
        y = att @ v
        return self.out(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(args.width), nn.LayerNorm(args.width), Attention()
        self.mlp = nn.Sequential(
            nn.Linear(args.width, 4 * args.width), nn.GELU(), nn.Linear(4 * args.width, args.width)
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(args.vocabulary, args.width), nn.Embedding(args.tokens, args.width)
        self.blocks = nn.Sequential(*(Block() for _ in range(args.layers)))
        self.head = nn.Linear(args.width, args.vocabulary)

    def forward(self, x):
        return self.head(self.blocks(self.tokens(x) + self.places.weight))


torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(args.steps):
    text = torch.randint(args.vocabulary, (args.batch, args.tokens + 1))
    logits = model(text[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, args.vocabulary), text[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
