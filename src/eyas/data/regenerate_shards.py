"""The folder of a regeneration: shards of finished conversations, whole files or none."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eyas.core.errors import DataError
from eyas.data.files import make_folder, read_manifest, sha256_json, write_bytes, write_json
from eyas.data.regenerate_dialog import Dialog, RegenerateConfig
from eyas.data.sources import read_lines

RUN_FORMAT, FORMAT = "eyas-regeneration-run", "eyas-regeneration"
NAMED = ("temperatures", "max_new_tokens", "max_prompt_tokens", "seed")
"""Settings that run.json always names; the others only where they are not the default."""


class ShardWriter:
    """Buffers finished dialogs and moves whole shards into place; knows which ids are done."""

    def __init__(self, out: Path, config: RegenerateConfig, about: dict[str, Any]) -> None:
        make_folder(out)
        self.out, self.shard_size = out, config.shard_size
        # What a run leaves at its default is not named, so that folders from before an option came go on.
        plain = asdict(RegenerateConfig())
        settings = {k: v for k, v in asdict(config).items() if k in NAMED or v != plain[k]}
        for name in ("shard_size", "window"):
            settings.pop(name, None)
        settings["temperatures"] = [list(pair) for pair in config.temperatures.items()]
        self.run = {"format": RUN_FORMAT, "about": about, "settings": settings}
        path = out / "run.json"
        if path.exists():
            before = read_manifest(path, RUN_FORMAT)
            if before != json.loads(json.dumps(self.run)):
                changed = [
                    key for key in self.run if before.get(key) != json.loads(json.dumps(self.run[key]))
                ]
                raise DataError(
                    f"{path}: the folder holds another run ({', '.join(changed)} differ); continue it with "
                    "the same source, target and parameters, or choose another --out"
                )
        else:
            write_json(path, self.run)
        self.done: set[str] = set()
        self.counts = {"num_conversations": 0, "num_answers": 0, "num_answer_tokens": 0, "num_tokens": 0}
        self.shards = sorted(out.glob("shard-*.jsonl"))
        for shard in self.shards:
            for number, record in read_lines(shard):
                try:
                    self._count(record)
                except (KeyError, TypeError, ValueError) as error:
                    raise DataError(
                        f"{shard}:{number}: no record of this run ({error!r}); remove it"
                    ) from None
        self.buffer: list[dict[str, Any]] = []

    def _count(self, record: dict[str, Any]) -> None:
        self.done.add(record["id"])
        self.counts["num_conversations"] += 1
        self.counts["num_answers"] += len(record["finish_reasons"])
        self.counts["num_answer_tokens"] += sum(end - begin for begin, end in record.get("spans", []))
        self.counts["num_tokens"] += len(record.get("token_ids", []))
        if "num_written" in record:
            self.counts["num_written"] = self.counts.get("num_written", 0) + record["num_written"]

    def add(self, dialog: Dialog) -> None:
        """Take a finished dialog; writes a shard when one is full."""
        record: dict[str, Any] = {
            "id": dialog.prompt.id,
            "source": dialog.prompt.source,
            "temperature": dialog.temperature,
            "messages": dialog.messages,
            "finish_reasons": dialog.finish_reasons,
        }
        if dialog.prompt_id != dialog.prompt.id:
            record["prompt_id"] = dialog.prompt_id
        num_users = sum(message["role"] == "user" for message in dialog.messages)
        if num_users > len(dialog.prompt.turns):
            record["num_written"] = num_users - len(dialog.prompt.turns)
        if dialog.spans:
            record |= {"token_ids": dialog.ids, "spans": dialog.spans}
        self.buffer.append(record)
        if len(self.buffer) >= self.shard_size:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered as a shard."""
        if not self.buffer:
            return
        path = self.out / f"shard-{len(self.shards):05d}.jsonl"
        lines = [json.dumps(record, ensure_ascii=False, separators=(",", ":")) for record in self.buffer]
        write_bytes(path, ("\n".join(lines) + "\n").encode())
        self.shards.append(path)
        for record in self.buffer:
            self._count(record)
        self.buffer = []

    def manifest(self, *, seconds: float, new_tokens: int, skipped: int) -> dict[str, Any]:
        """Write and return the totals; seconds and tok/s add up over resumed runs."""
        path = self.out / "manifest.json"
        before = read_manifest(path, FORMAT) if path.exists() else {}
        seconds += float(before.get("seconds", 0.0))
        generated = new_tokens + int(before.get("num_generated", 0))
        manifest = {
            "format": FORMAT,
            "run": self.run,
            **self.counts,
            "num_skipped": skipped,
            "num_generated": generated,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(generated / seconds, 1) if seconds else 0.0,
            "shards": [shard.name for shard in self.shards],
        }
        manifest["hash"] = sha256_json({"run": self.run, "counts": self.counts, "shards": manifest["shards"]})
        write_json(path, manifest)
        return manifest
