"""The folder of a run that writes prompts: draws in the order of their numbers, whole files or none."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from eyas.core.errors import DataError
from eyas.data.files import make_folder, read_manifest, sha256_file, write_bytes, write_json

RUN_FORMAT, DRAWS_FORMAT, FORMAT = "eyas-prompts-run", "eyas-prompts-draws", "eyas-prompts"


class DrawsFolder:
    """Draws on disk, and those that wait to be written."""

    def __init__(self, out: Path, run: dict[str, Any]) -> None:
        make_folder(out)
        self.out, self.run = out, json.loads(json.dumps({"format": RUN_FORMAT, **run}))
        path = out / "run.json"
        if not path.exists():
            write_json(path, self.run)
        elif (before := read_manifest(path, RUN_FORMAT)) != self.run:
            changed = [key for key in self.run if before.get(key) != self.run[key]]
            raise DataError(
                f"{path}: the folder holds another run ({', '.join(changed)} differ); continue it with the "
                "same target and parameters, or choose another --out"
            )
        self.records: list[dict[str, Any]] = []
        self.faults: Counter[str] = Counter()
        self.next, self.tokens, self.seconds, self.num_shards = 0, 0, 0.0, 0
        for shard in sorted(out.glob("draws-*.json")):
            value = read_manifest(shard, DRAWS_FORMAT)
            if value["first"] != self.next:
                raise DataError(f"{shard}: begins at draw {value['first']}, not at {self.next}; begin anew")
            self._count(value)
        self._begin()

    def _begin(self) -> None:
        self.first, self.new, self.new_faults = self.next, list[dict[str, Any]](), Counter[str]()
        self.new_tokens, self.started = 0, time.monotonic()

    def _count(self, shard: dict[str, Any]) -> None:
        self.records += shard["records"]
        self.faults.update(shard["faults"])
        self.next, self.num_shards = shard["end"], self.num_shards + 1
        self.tokens, self.seconds = self.tokens + shard["num_tokens"], self.seconds + shard["seconds"]

    @property
    def num_kept(self) -> int:
        """Prompts so far, on disk or not."""
        return len(self.records) + len(self.new)

    @property
    def num_judged(self) -> int:
        """Draws in `new` and `new_faults`."""
        return len(self.new) + self.new_faults.total()

    def add(self, record: dict[str, Any] | None, fault: str, *, num_tokens: int) -> None:
        """Take the next draw: a prompt, or the fault for which there is none."""
        if record is None:
            self.new_faults[fault] += 1
        else:
            self.new.append(record)
        self.new_tokens += num_tokens

    def flush(self) -> None:
        """Write what was judged since the last time."""
        if not self.num_judged:
            return
        shard = {
            "format": DRAWS_FORMAT,
            "first": self.first,
            "end": self.first + self.num_judged,
            "num_tokens": self.new_tokens,
            "seconds": round(time.monotonic() - self.started, 3),
            "faults": dict(sorted(self.new_faults.items())),
            "records": self.new,
        }
        write_json(self.out / f"draws-{self.num_shards:05d}.json", shard)
        self._count(shard)
        self._begin()

    def close(self, count: int) -> dict[str, Any]:
        """Write the first `count` prompts and the manifest; returns it."""
        records, path = self.records[:count], self.out / "prompts.jsonl"
        lines = [json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n" for record in records]
        write_bytes(path, "".join(lines).encode())
        manifest = {
            "format": FORMAT,
            "run": self.run,
            "num_prompts": len(records),
            "num_draws": self.next,
            "faults": dict(sorted(self.faults.items())),
            "num_tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens / self.seconds, 1) if self.seconds else 0.0,
            "sha256": sha256_file(path),
        }
        write_json(self.out / "manifest.json", manifest)
        return manifest
