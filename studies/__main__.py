"""`python -m studies NAME ...` runs one study; every study takes `--help` and `--quick`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

# Some virtual CPUs advertise AMX but fault on it; this must be set before the first matmul.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

STUDIES = {
    "lm": ("studies.lm", "language models at ten tokens per parameter (Table 2, Fig. 10)"),
    "levels": ("studies.levels", "levels that learn, trained for that, on long text"),
    "kept": ("studies.kept", "what learning levels keep of a text after another"),
    "formal": ("studies.formal", "state tracking (Table 5) and length generalisation"),
    "recall": ("studies.recall", "in-context recall (MQAR) at two state sizes"),
    "deep_memory": ("studies.deep_memory", "Titans: both layers learn, or the last one"),
    "mad": ("studies.mad", "MAD, six small tasks (Table 4)"),
    "ablations": ("studies.ablations", "ablations of Hope (Table 6)"),
    "optimizers": ("studies.optimizers", "M3 at real length (Fig. 11)"),
    "facts": ("studies.facts", "facts of short texts: recalled, and at what cost (study C)"),
    "babilong": ("studies.babilong", "BABILong to ten million tokens (Fig. 9)"),
    "niah": ("studies.niah", "needles in haystacks, 4K to 64K (Table 1)"),
    "levels_chunks": ("studies.levels_chunks", "how many levels, how slow (Fig. 7)"),
    "context": ("studies.context", "loss against context length to 64K (Fig. 10)"),
    "pretrained": ("studies.pretrained", "the small Hope that comes with the package"),
    "queue": ("studies.queue", "all of the above, job by job, several at a time"),
    "adapt": ("studies.adapt.command", "do pretrained models learn a stream without forgetting?"),
    "continual": ("studies.continual.study", "class after class on frozen bases (Fig. 6)"),
    "timescales": ("studies.continual.timescales", "do several time scales earn their place?"),
    "beyond": ("studies.continual.beyond", "streams of pictures and of reading"),
    "languages": ("studies.languages.study", "new languages, one after another (Fig. 8)"),
    "optim": ("studies.optim.command", "do the optimizers do what the paper says?"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a study; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print("usage: python -m studies NAME ...\n")
        print("\n".join(f"  {name:<14} {what}" for name, (_, what) in STUDIES.items()))
        return 0 if given else 2
    name, *rest = given
    if name not in STUDIES:
        print(f"studies: unknown study {name!r}; known: {', '.join(STUDIES)}", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(STUDIES[name][0])
        if hasattr(module, "main"):  # more than one study, or none
            return int(module.main(rest) or 0)
        from studies.harness.command import run_study

        return run_study(module.study, module.__doc__ or "", rest)
    except (ValueError, OSError) as error:
        print(f"studies {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
