"""Serve a ResNet's answers over HTTP, each request in a thread of its own: `python examples/serve.py --port 8017`.

Something has to ask: `examples/ask.py`. The weights are made from a fixed seed.
"""

import argparse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from torch import nn


def block(channels, out, stride):
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
        nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
    )  # fmt: skip


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(block(3, 32, 2), block(32, 64, 2), block(64, 128, 2), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(128, 10)

    def forward(self, images):
        return self.head(self.body(images).flatten(1))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else an answer waits 40 ms for the client to acknowledge its headers

    def do_POST(self):
        sent = bytearray(self.rfile.read(int(self.headers["Content-Length"])))
        images = torch.frombuffer(sent, dtype=torch.uint8).view(-1, 3, 64, 64).float() / 255
        with torch.no_grad():
            answers = self.server.model(images).argmax(1)
        body = ",".join(map(str, answers.tolist())).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        """One line a request is too much."""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8017)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    server = ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler)
    server.model = Classifier().eval()
    print(f"serving on port {server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
