"""A pretrained model that learns what it reads, for two users, on one set of weights.

    python examples/keep_learning.py MODEL BOOK.txt

MODEL is a folder, a hub name, a .gguf file or a llama2.c .bin file beside its tokenizer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nestling
from nestling.adaptation import load_pretrained


def main(name: str, book: Path) -> None:
    model, tokenizer = load_pretrained(name)
    text = book.read_text(encoding="utf-8")
    read, ahead = text[:12000], text[12000:16000]

    reader = nestling.adapt(model, [64, 256, 1024], rate=0.05, tokenizer=tokenizer)
    other = nestling.adapt(model, [64, 256, 1024], rate=0.05, tokenizer=tokenizer)

    print(f"before: {reader.score(ahead):.3f} nats per token on what comes next")
    report = reader.learn(read)
    print(f"after {report.tokens:,} tokens: {reader.score(ahead):.3f}")
    print(f"the other user, who read nothing: {other.score(ahead):.3f}")
    print(reader)
    print(reader.generate(ahead[:40], max_new_tokens=40, do_sample=False))

    reader.save("memory")  # learned weights only; `nestling generate MODEL --memory memory`
    reader.reset("slow")  # forget one level, or roll back, or merge it into the model
    print(f"without its slow level: {reader.score(ahead):.3f}")
    reader.load("memory")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]))
