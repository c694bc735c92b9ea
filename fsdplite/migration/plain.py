"""Plain torch that means something else once parameters are sharded."""

from __future__ import annotations

import ast

from . import config_settings
from .call import Written, key_of, one_line
from .names import Names
from .rule import CHANGE, DROP, NONE

__all__ = ["NAME", "NORM", "WHOLE_TENSOR_OPTIMIZERS", "Plain"]

NAME = "torch"

WHOLE_TENSOR_OPTIMIZERS = frozenset(
    "Adafactor Muon LBFGS Shampoo DistributedShampoo SOAP KFAC LARS LAMB Lamb Lars".split()
)

_WRITES = "fsdp.mark_updated(model)"
_WRITES_NOTE = (
    "after writes through .data, if the model is wrapped by then: .data is this rank's slice, right for element-wise "
    "arithmetic; whole values go in with fsdp.full_params(module, writeback=True)"
)
_SAVED_NOTE = (
    "call it on every rank and save what it returns on rank 0 (it is empty elsewhere), or save without gathering: "
    "fsdp.save_checkpoint(root, model, step=step)"
)
_OPTIMIZER_NOTE = (
    "it reads whole tensors, and is refused at its first step: use an element-wise one, such as torch.optim.AdamW"
)
NORM = 'norm = model.clip_grad_norm_(float("inf"))'
_NORM_NOTE = "a gradient is this rank's slice, and its norm or sum is no norm of the whole: this only measures"
_NORMS = ("torch.norm", "torch.linalg.norm", "torch.linalg.vector_norm", "torch.sum", "torch.square", "torch.max")
_REDUCTIONS = ("norm", "sum", "mean", "max")
_SYNC_NOTE = "works the same, at every stage; this attribute of DDP has no meaning"
_COLLECTIVES = {
    "broadcast": "fsdp.fsdp_wrap starts every rank from rank 0's weights; on a wrapped model it would mix slices",
    "all_reduce": "gradients are averaged in backward; on a wrapped model it would mix slices of different elements",
    "reduce": "gradients are averaged in backward; on a wrapped model it would mix slices of different elements",
    "all_gather": "a parameter is this rank's slice: fsdp.full_params(module), fsdp.full_grad(model, name) are whole",
}
_SAVES = ("torch.save", "safetensors.torch.save_file", "safetensors.torch.save_model")
_PARAMETERS = ("parameters", "named_parameters")

Found = tuple[str, Written]


class Plain:
    """Looks at one file. Parameters are known where a loop takes them from a model."""

    def __init__(self, tree: ast.AST, names: Names, parents: dict[ast.AST, ast.AST]) -> None:
        self.names = names
        self.parents = parents
        self.parameters: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)) and _takes_parameters(node.iter):
                self.parameters |= {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}

    def look(self, node: ast.AST) -> Found | None:
        """What to say about a node that no table knows."""
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Attribute) and target.attr == "require_backward_grad_sync":
                    text = f"{one_line(target.value)}.set_requires_gradient_sync({one_line(node.value)})"
                    return CHANGE, Written(text, (_SYNC_NOTE,))
            return self._write(node) if any(self._is_data(target) for target in targets) else None
        if not isinstance(node, ast.Call):
            return None
        dotted = self.names.dotted(node.func)
        if node.args and any(name in dotted for name in _SAVES):
            return self._saved(node.args[0])
        if node.args and any(name.startswith("torch.distributed.") for name in dotted):
            return self._collective(node, key_of(node.func))
        if node.args and dotted and dotted[0] in _NORMS and any(map(self._is_gradient, ast.walk(node.args[0]))):
            return CHANGE, Written(NORM, (_NORM_NOTE,))
        if "torch.autograd.grad" in dotted and any(_takes_parameters(part) for part in node.args[1:2]):
            note = "it cannot return gradients of sharded parameters: loss.backward(), then fsdp.full_grad(model, name)"
            return NONE, Written("", (note,))
        if isinstance(node.func, (ast.Name, ast.Attribute)) and key_of(node.func) in WHOLE_TENSOR_OPTIMIZERS:
            return NONE, Written("", (_OPTIMIZER_NOTE,))
        return self._method(node)

    def _method(self, node: ast.Call) -> Found | None:
        if not isinstance(node.func, ast.Attribute):
            return None
        method, owner = node.func.attr, node.func.value
        if method.endswith("_") and not method.startswith("_") and self._is_data(owner):
            return self._write(node)
        if method in _REDUCTIONS and self._is_gradient(owner):
            return CHANGE, Written(NORM, (_NORM_NOTE,))
        if method == "save_pretrained" and "model" in one_line(owner).lower():
            note = "it refuses slices: save a checkpoint, and export its step; the configuration is saved as before"
            where = one_line(node.args[0]) if node.args else "out_dir"
            return CHANGE, Written(f"fsdp.export_safetensors(root, {where})", (note,))
        return None

    def _collective(self, node: ast.Call, name: str) -> Found | None:
        """A collective that is given a parameter of a loop over parameters, or its values or gradient."""
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            value = argument
            while isinstance(value, ast.Attribute) and value.attr in ("data", "grad"):
                value = value.value
            if isinstance(value, ast.Name) and value.id in self.parameters and name in _COLLECTIVES:
                return DROP, Written("", (_COLLECTIVES[name],))
        return None

    def _write(self, node: ast.AST) -> Found | None:
        above: ast.AST | None = node
        while above is not None:
            if isinstance(above, ast.FunctionDef) and ("init" in above.name or above.name == "reset_parameters"):
                return None  # it runs before wrapping
            above = self.parents.get(above)
        return CHANGE, Written(_WRITES, (_WRITES_NOTE,))

    def _is_data(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Attribute) or node.attr != "data":
            return False
        owner = node.value
        if isinstance(owner, ast.Name):
            return owner.id in self.parameters
        return isinstance(owner, ast.Attribute) and owner.attr in ("weight", "bias")

    def _is_gradient(self, node: ast.AST) -> bool:
        while isinstance(node, (ast.Attribute, ast.Call)):
            if isinstance(node, ast.Attribute) and node.attr == "grad":
                return isinstance(node.value, ast.Name) and node.value.id in self.parameters
            node = node.func if isinstance(node, ast.Call) else node.value
        return False

    # ---------------------------------------------------------------------------------------------- saved state

    def _saved(self, node: ast.expr) -> Found | None:
        node = self.names.value(node)
        kept = self._state(node)
        if kept is not None:
            kind, owner = kept
            if kind == "model":
                return CHANGE, Written(f"state = fsdp.full_state_dict({owner})", (_SAVED_NOTE,))
            note = "each rank holds its part of the state, and it refuses to be pickled; it is saved with the model"
            return CHANGE, Written(f"fsdp.save_checkpoint(root, model, {owner}, step=step)", (note,))
        if isinstance(node, ast.IfExp):
            return self._saved(node.body) or self._saved(node.orelse)
        written = config_settings.written_out(node)
        if written is None:
            return None
        node = written
        found: dict[str, str] = {}
        others = []
        for key, value in zip(node.keys, node.values):
            kept = self._state(self.names.value(value))
            if kept is not None and kept[0] not in found:
                found[kept[0]] = kept[1]
            elif key is not None:
                others.append(f"{one_line(key)}: {one_line(value)}")
        if not found:
            return None
        members = [found.get("model", "model")] + ([found["optimizer"]] if "optimizer" in found else [])
        extra = ", extra={" + ", ".join(others) + "}" if others else ""
        text = f"fsdp.save_checkpoint(root, {', '.join(members)}, step=step{extra})"
        note = "on every rank; root is a folder, and extra takes JSON values and tensors. fsdp.load_checkpoint reads it"
        return CHANGE, Written(text, (note,))

    def _state(self, node: ast.expr) -> tuple[str, str] | None:
        """("model" or "optimizer", the object) for ``object.state_dict()``, and for a model itself."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "state_dict":
            owner = one_line(node.func.value).removesuffix(".module")
            last = owner.rpartition(".")[2].lower()
            if any(word in last for word in ("sched", "scaler", "loader", "sampler")):
                return None
            return ("optimizer" if last.startswith("opt") or "optim" in last else "model"), owner
        if isinstance(node, (ast.Name, ast.Attribute)) and key_of(node) in ("model", "net", "module"):
            return "model", one_line(node).removesuffix(".module")
        return None


def _takes_parameters(node: ast.AST) -> bool:
    return any(
        isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in _PARAMETERS
        for part in ast.walk(node)
    )
