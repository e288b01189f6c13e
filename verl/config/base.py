"""What every section is: frozen, strict, and documented under each field."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section: unknown keys are refused, and the text under a field is its documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Component(BaseModel):
    """A registered function chosen by name, with its constants beside it: `{name: gae, lam: 0.95}`.

    The constants are checked against the class that the function was registered with (`verl.config.loader.constants`).
    """

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    name: str

    @property
    def constants(self) -> dict[str, Any]:
        return dict(self.model_extra or {})
