"""Settings from the environment (DYNOTUNE_*), read once at start."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FiniteFloat,
    PositiveFloat,
    SecretStr,
    ValidationError,
    field_validator,
)
from pydantic_core import PydanticUseDefault
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from service.contract.paths import expanded
from service.errors import Misconfigured

PREFIX = "DYNOTUNE_"
DATA_ROOTS = (Path(),)  # where DYNOTUNE_DATA_ROOTS is not set: the current folder
SECRET = ("admin_key", "webhook_key")  # settings whose values are never shown


def _writable(home: Path) -> Path:
    """The state folder, made where it is not there yet; Misconfigured where nothing can be written into it."""
    home = expanded(str(home)).resolve()
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)  # others on the host are not to read it
        with tempfile.TemporaryFile(dir=home):
            return home
    except OSError as error:
        raise Misconfigured(f"{PREFIX}HOME: {home} cannot be written ({error.strerror}).") from error


def sqlite_url(file: Path) -> str:
    """The URL of a database in a file. Two characters of a path would have a meaning in it."""
    return f"sqlite:///{str(file).replace('%', '%25').replace('?', '%3F')}"


def _separated(value: Any) -> Any:
    """The folders of a text that separates them as PATH does; none for the empty text."""
    return [part for part in value.split(os.pathsep) if part] if isinstance(value, str) else value


def _resolved(roots: Iterable[str | Path]) -> tuple[Path, ...]:
    return tuple(expanded(str(root)).resolve() for root in roots)


def named_data_roots() -> tuple[Path, ...]:
    """The setting `data_roots` by itself, for code that is given no settings."""
    named = os.environ.get(f"{PREFIX}DATA_ROOTS")
    return _resolved(DATA_ROOTS if named is None else _separated(named))


def _hub_cache() -> Path:
    """The hub's cache folder, by huggingface_hub's own rules (HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME)."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return expanded(cache)
    xdg = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return expanded(os.environ.get("HF_HOME", f"{xdg}/huggingface")) / "hub"


class Settings(BaseSettings):
    """Where state lies and what is allowed. A field's description says what its variable must be."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True)

    home: Annotated[Path, AfterValidator(_writable)] = Field(default=Path("~/.dynotune"), validate_default=True)
    database_url: str = Field(default_factory=lambda known: sqlite_url(known["home"] / "dynotune.db"))
    # The folders that local models and data may come from. Empty allows none; other settings take empty for unset.
    data_roots: Annotated[
        tuple[Path, ...],
        NoDecode,
        BeforeValidator(_separated),
        AfterValidator(_resolved),
    ] = Field(default=DATA_ROOTS, validate_default=True)
    hub_cache: Path = Field(default_factory=_hub_cache)
    # The same for everybody on the host, whatever their DYNOTUNE_HOME and TMPDIR: a device is locked for all of them.
    lock_folder: Path = Field(default=Path("/tmp/dynotune-locks"), validation_alias=f"{PREFIX}LOCKS")
    # Further names, separated by commas, that the server answers to: a proxy's, or a container's.
    allowed_hosts: Annotated[
        tuple[str, ...],
        NoDecode,
        BeforeValidator(lambda value: re.findall(r"[^,\s]+", value) if isinstance(value, str) else value),
    ] = ()
    require_keys: bool = Field(default=False, description="yes or no")
    # A key that may do everything, on every control plane with this setting: to make the first keys, or the only key.
    admin_key: SecretStr | None = Field(
        default=None, description="at least 20 characters long, of ASCII without spaces", min_length=20
    )
    rate_limit: str | None = Field(default="6000/minute", description="a number of requests a time, as in 600/minute")
    keep_days: PositiveFloat | None = Field(default=None, description="a number of days, after which ended jobs go")
    log: Literal["text", "json"] = Field(default="text", description="text or json")
    log_level: Literal["debug", "info", "warning"] = Field(default="info", description="debug, info or warning")
    # The secret that those of webhooks are derived from: the same for all control planes that share a database.
    webhook_key: SecretStr | None = Field(default=None, description="at least 20 characters long", min_length=20)
    webhook_private: bool = Field(default=False, description="yes or no")
    upload_mib: int = Field(default=1024, ge=1, description="the largest dataset that may be sent, a number of MiB")
    allow_remote_code: bool = Field(default=False, description="yes or no")
    allow_pickle: bool = Field(default=False, description="yes or no")
    min_free_disk_gib: FiniteFloat = Field(default=1.0, description="a number of GiB")

    @field_validator("admin_key")
    @classmethod
    def _fits_a_header(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.fullmatch("[!-~]+", value.get_secret_value()):
            raise ValueError("no header of a request can hold it")
        return value

    @field_validator("rate_limit")
    @classmethod
    def _is_a_rate(cls, value: str | None) -> str | None:
        if value is not None:
            from limits import parse  # imported here, as most commands read settings and limit nothing

            if parse(value).amount < 1:
                raise ValueError("allows nothing")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _empty_is_unset(cls, value: Any, info: Any) -> Any:
        if isinstance(value, str) and info.field_name in SECRET:
            value = value.strip()  # a file that a secret is mounted from ends with a line break
        if value == "" and info.field_name != "data_roots":
            raise PydanticUseDefault
        return value

    @property
    def min_free_disk_bytes(self) -> int:
        """Disk that has to be free before anything is measured or received."""
        return int(self.min_free_disk_gib * 2**30)

    @property
    def uploads(self) -> Path:
        """The folder of data that was sent to the control plane."""
        return self.home / "uploads"

    @property
    def keep_seconds(self) -> float | None:
        """How long jobs are kept after their end; None for ever."""
        return None if self.keep_days is None else self.keep_days * 86400

    @classmethod
    def from_environment(cls) -> Settings:
        """The settings of this process. Creates DYNOTUNE_HOME; Misconfigured says which variable is wrong."""
        try:
            return cls()
        except ValidationError as error:
            raise Misconfigured(" ".join(_sentence(dict(item)) for item in error.errors())) from error


def _sentence(item: dict[str, Any]) -> str:
    """The variable, what it must be and what it is, for one of pydantic's errors."""
    name = str(item["loc"][0])
    given = "" if name in SECRET else f", not {item['input']!r}"
    return f"{PREFIX}{name.upper()} must be {Settings.model_fields[name].description}{given}."
