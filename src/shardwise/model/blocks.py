"""Units, found from the model's own metadata. A unit is what one all-gather moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.errors import UserError
from shardwise.internals.hugging_face import declared_blocks

# A list of modules with less than this share of the parameters is not worth units of its own.
LIST_SHARE = 0.01
# A single module with more than this share is gathered by itself rather than with the root.
LARGE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Unit:
    """Modules that are gathered and freed together."""

    name: str
    modules: tuple[str, ...]
    num_params: int
    is_block: bool


@dataclass(frozen=True, slots=True)
class UnitMap:
    """All units in forward order, and the parameters that are left to the root."""

    units: tuple[Unit, ...]
    root_params: int
    found_by: str

    @property
    def blocks(self) -> tuple[Unit, ...]:
        """The repeated decoder blocks."""
        return tuple(unit for unit in self.units if unit.is_block)


def find_units(
    model: nn.Module, *, classes: Sequence[str] | None = None, min_params: int | None = None
) -> UnitMap:
    """The units of `model`. Raises where it has no blocks: it would be one giant all-gather."""
    blocks, found_by = _find_blocks(model, classes, min_params)
    _validate_blocks(model, blocks, found_by)
    head, tail = _find_ends(model, blocks)
    names = {id(module): name for name, module in model.named_modules()}
    owners = _owners_outside(model, [*(names[id(block)] for block in blocks), *head, *tail])
    large = _large_leftovers(model, blocks, {*head, *tail, *owners})
    inner = [block for block in blocks if not _holds_another(block, blocks)]
    groups = [
        (head, False),
        *(((name,), False) for name in large),
        *(((names[id(block)],), block in inner) for block in blocks),
        (tail, False),
        *(((name,), False) for name in owners),
    ]
    units = _units_of_groups(model, _without_roots_own(model, groups))
    root_params = _num_params(model) - sum(unit.num_params for unit in units)
    return UnitMap(tuple(units), root_params, found_by)


def _units_of_groups(
    model: nn.Module, groups: Sequence[tuple[tuple[str, ...], bool]]
) -> list[Unit]:
    """Groups that share a parameter become one unit: FSDP2 would untie what two units hold."""
    roots = {id(model.get_submodule(name)) for group, _ in groups for name in group}
    merged: list[tuple[tuple[str, ...], bool, dict[int, int]]] = []
    for names, is_block in groups:
        sizes = {id(p): p.numel() for name in names for p in _own_params(model, name, roots)}
        sharing = [entry for entry in merged if not sizes.keys().isdisjoint(entry[2])]
        for entry in sharing:
            names, is_block = (*entry[0], *names), is_block and entry[1]
            sizes |= entry[2]
        place = merged.index(sharing[0]) if sharing else len(merged)
        merged = [entry for entry in merged if entry not in sharing]
        if sizes:
            merged.insert(place, (names, is_block, sizes))
    return [
        Unit(_unit_name(names), names, sum(sizes.values()), is_block)
        for names, is_block, sizes in merged
    ]


def _without_roots_own(
    model: nn.Module, groups: Sequence[tuple[tuple[str, ...], bool]]
) -> list[tuple[tuple[str, ...], bool]]:
    """Groups that share a parameter with the model itself are left to the root."""
    own = {id(p) for p in model.parameters(recurse=False)}
    return [
        (names, is_block)
        for names, is_block in groups
        if own.isdisjoint(id(p) for name in names for p in model.get_submodule(name).parameters())
    ]


def _owners_outside(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Modules outside these that also hold one of their parameters.

    BERT's head and the linear layer in it, for example, hold one bias. Such modules join the unit,
    because FSDP2 would otherwise make two parameters of one.
    """
    members = [model.get_submodule(name) for name in names]
    inside = {id(module) for member in members for module in member.modules()}
    params = {id(p) for member in members for p in member.parameters()}
    return [
        name
        for name, module in model.named_modules()
        if name
        and id(module) not in inside
        and not params.isdisjoint(id(p) for p in module.parameters(recurse=False))
    ]


def _own_params(model: nn.Module, name: str, roots: set[int]) -> list[nn.Parameter]:
    """Parameters below a module, without those of other units inside it."""
    params: list[nn.Parameter] = []

    def visit(module: nn.Module) -> None:
        params.extend(module.parameters(recurse=False))
        for child in module.children():
            if id(child) not in roots:
                visit(child)

    visit(model.get_submodule(name))
    return params


def _holds_another(block: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    inside = {id(module) for module in block.modules()} - {id(block)}
    return any(id(other) in inside for other in blocks)


def _find_blocks(
    model: nn.Module, classes: Sequence[str] | None, min_params: int | None
) -> tuple[list[nn.Module], str]:
    if classes:
        return _blocks_by_class(model, classes), f"shard.unit_classes={list(classes)}"
    if min_params:
        return _blocks_by_size(model, min_params), f"shard.unit_min_params={min_params}"
    blocks = _blocks_by_metadata(model)
    kinds = dict.fromkeys(type(block).__name__ for block in blocks)
    return blocks, f"the model's own lists of {', '.join(kinds) or 'nothing'}"


def _blocks_by_class(model: nn.Module, classes: Sequence[str]) -> list[nn.Module]:
    known = {type(module).__name__ for module in model.modules()}
    for name in classes:
        if name not in known:
            raise UserError(
                f"shard.unit_classes: no module of class {name!r} in {type(model).__name__}",
                fix=f"write shard.unit_classes=[CLASS] with some of {', '.join(sorted(known))}",
            )
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if type(child).__name__ in classes:
                found.append(child)
            else:
                visit(child)

    visit(model)
    return found


def _blocks_by_size(model: nn.Module, min_params: int) -> list[nn.Module]:
    """Units by size, in post-order: a module becomes a unit when it has enough parameters that no
    unit inside it holds."""
    blocks: list[nn.Module] = []
    sizes = {id(p): p.numel() for p in model.parameters()}

    def visit(module: nn.Module) -> set[int]:
        left = {id(p) for p in module.parameters(recurse=False)}
        for child in module.children():
            left |= visit(child)
        is_unit = sum(sizes[key] for key in left) >= min_params and module is not model
        # Containers have no forward of their own, so nothing would gather them.
        if is_unit and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            blocks.append(module)
            return set()
        return left

    visit(model)
    return blocks


def _blocks_by_metadata(model: nn.Module) -> list[nn.Module]:
    """Members of the outermost module lists: those of `_no_split_modules`, else the heavy ones.

    Every stack of the model counts. A second decoder or an unused vision tower would otherwise be
    part of the root, which stays gathered for the whole forward.
    A list of one member counts where the member's class is declared, and in a model of one layer,
    which has no longer list.
    """
    return _blocks_in_lists(model, shortest=2) or _blocks_in_lists(model, shortest=1)


def _blocks_in_lists(model: nn.Module, *, shortest: int) -> list[nn.Module]:
    declared = declared_blocks(model)
    least = LIST_SHARE * _num_params(model)
    blocks: list[nn.Module] = []

    def is_declared(module: nn.Module) -> bool:
        return type(module).__name__ in declared

    def holds_inner_stack(module: nn.Module) -> bool:
        lists = (inner for inner in module.modules() if isinstance(inner, nn.ModuleList))
        return any(is_declared(member) for inner in lists for member in inner)

    def visit(module: nn.Module) -> None:
        children = list(module.children())
        is_list = isinstance(module, nn.ModuleList)
        heavy = is_list and len(children) >= shortest and _num_params(module) >= least
        for child in children:
            if is_list and (is_declared(child) or (heavy and not holds_inner_stack(child))):
                blocks.append(child)
            else:
                visit(child)

    visit(model)
    return [block for block in blocks if _num_params(block)]


def _validate_blocks(model: nn.Module, blocks: Sequence[nn.Module], found_by: str) -> None:
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    members = {id(member) for inner in lists for member in inner}
    # A model of one layer has one block, and its embedding and its head besides.
    if len(blocks) >= 2 or any(id(block) in members for block in blocks):
        return
    classes = sorted({type(m).__name__ for m in model.modules() if _num_params(m)})
    raise UserError(
        f"found {len(blocks)} units in {type(model).__name__} (by {found_by}); at least 2 are "
        "needed",
        why="with fewer, one all-gather moves the whole model, and nothing overlaps with it",
        fix="name the class of the repeated block: shard.unit_classes=[CLASS], or the size of "
        f"units: shard.unit_min_params=NUMBER; its classes: {', '.join(classes[:12])}",
    )


def _find_ends(
    model: nn.Module, blocks: Sequence[nn.Module]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Module names of the first unit (embedding) and the last one (final norm and head).

    With tied embeddings the one matrix is needed at both ends, so all form one unit, which
    stays gathered from the first lookup to the loss.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    names = {id(module): name for name, module in model.named_modules()}
    embed = _outside(getattr(model, "get_input_embeddings", None), inside)
    head = _outside(getattr(model, "get_output_embeddings", None), inside)
    norm = _final_norm(model, blocks, inside)
    tail = [module for module in (norm, head) if module is not None]
    if embed is None:
        return (), tuple(names[id(module)] for module in tail)
    if head is not None and _share_params(embed, head):
        unit = [embed, *(module for module in tail if module is not embed)]
        return tuple(names[id(module)] for module in unit), ()
    return (names[id(embed)],), tuple(names[id(module)] for module in tail)


def _large_leftovers(model: nn.Module, blocks: Sequence[nn.Module], taken: set[str]) -> list[str]:
    """Single modules outside all units whose own parameters are a large share of the model."""
    inside = {id(module) for block in blocks for module in block.modules()}
    seen = {id(p) for name in taken for p in model.get_submodule(name).parameters()}
    least = LARGE_SHARE * _num_params(model)
    large = []
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        if (
            id(module) not in inside
            and module is not model
            and sum(p.numel() for p in own) >= least
        ):
            large.append(name)
    return large


def _outside(getter: object, inside: set[int]) -> nn.Module | None:
    try:
        module = getter() if callable(getter) else None
    except NotImplementedError:
        return None
    return module if isinstance(module, nn.Module) and id(module) not in inside else None


def _final_norm(
    model: nn.Module, blocks: Sequence[nn.Module], inside: set[int]
) -> nn.Module | None:
    """The vector-only module that follows the heaviest block list in the module that owns it."""
    wanted = {id(block) for block in blocks}
    heaviest, norm = 0, None
    for owner in model.modules():
        children = list(owner.children())
        for index, child in enumerate(children):
            weight = sum(_num_params(block) for block in child.children() if id(block) in wanted)
            if isinstance(child, nn.ModuleList) and weight > heaviest:
                later = [m for m in children[index + 1 :] if id(m) not in inside]
                heaviest, norm = weight, next(filter(is_norm, later), None)
    return norm


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by its name and because it holds vectors only."""
    params = list(module.parameters())
    return (
        bool(params)
        and all(p.dim() == 1 for p in params)
        and "norm" in type(module).__name__.lower()
    )


def _share_params(first: nn.Module, second: nn.Module) -> bool:
    return not {id(p) for p in first.parameters()}.isdisjoint(id(p) for p in second.parameters())


def _unit_name(group: Sequence[str]) -> str:
    if len(group) == 1:
        return group[0]
    last = [name.split(".")[-1] for name in group]
    return (
        f"[{', '.join(last)}]" if len(last) <= 3 else f"[{last[0]} … {last[-1]}, {len(last)} tied]"
    )


def _num_params(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def iter_modules(model: nn.Module, unit: Unit) -> Iterator[nn.Module]:
    """The modules of one unit."""
    return (model.get_submodule(name) for name in unit.modules)
