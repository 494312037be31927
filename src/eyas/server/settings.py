"""What a server may be told; limits keep one client from taking everything."""

from dataclasses import dataclass, field

from eyas.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where it listens, who may use it, and how much of it one request may take."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any free port."""
    api_key: str | None = field(default=None, repr=False)
    """Asked for on /v1/* and /tokenize; None lets everybody in."""
    model_name: str | None = None
    """Name under which the target is served; None for its own."""
    max_queue: int = 256
    """Completions that may wait beyond those that run; the next request gets 429."""
    max_body_bytes: int = 4 << 20
    """Larger request bodies get 413."""
    max_choices: int = 64
    """Prompts times n of one request."""
    drain_seconds: float = 60.0
    """After SIGTERM, running requests get so long to end."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} must be from 0 to 65535")
        for name in ("max_body_bytes", "max_choices"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("max_queue", "drain_seconds"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or more")
        if self.api_key == "":
            raise ConfigError("api_key is empty: give a key, or leave it out to let everybody in")
