"""How each lever of the catalogue is applied: the same file names as service/levers.

A twin has any of: `load(choice, options)` before the model is loaded, `model(choice, model, method)` after it,
`process(choice)` for settings of the whole process. Precision, optimizer and batching are asked for by name.
"""

from __future__ import annotations

from types import ModuleType

from worker.levers import attention, batching, checkpointing, compile, optimizer, precision

TWINS: dict[str, ModuleType] = {
    module.NAME: module for module in (precision, attention, optimizer, checkpointing, compile, batching)
}
