"""Ask `examples/serve.py` for a while: `python examples/ask.py --port 8017 --threads 4 --requests 500`.

Prints how long a request took and a hash of all answers, which the server's levers must leave as it is.
"""

import argparse
import hashlib
import http.client
import random
import time
from concurrent.futures import ThreadPoolExecutor


def ask(port, seed, num):
    draw, took_s, answers = random.Random(seed), [], []
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for _ in range(num):
        images = draw.randbytes(draw.choice((1, 1, 1, 4)) * 3 * 64 * 64)
        begun_s = time.perf_counter()
        connection.request("POST", "/", images)
        answers.append(connection.getresponse().read().decode())
        took_s.append(time.perf_counter() - begun_s)
    connection.close()
    return took_s, answers


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8017)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--requests", type=int, default=500, help="of each thread")
    arguments = parser.parse_args()
    with ThreadPoolExecutor(arguments.threads) as pool:
        found = list(pool.map(lambda seed: ask(arguments.port, seed, arguments.requests), range(arguments.threads)))
    took_s = sorted(one for times, _ in found for one in times)
    digest = hashlib.sha256(repr([answers for _, answers in found]).encode()).hexdigest()[:12]
    print(f"{len(took_s)} requests, p50 {1000 * took_s[len(took_s) // 2]:.1f} ms, answers {digest}")


if __name__ == "__main__":
    main()
