"""Several modules as one file that needs none of them: their own sources, less what is not reached.

bundle(modules, roots, first=, note=) -> source

Imports among the modules go, names that two of them define get the module's name at their end, and
shapes become plain types. Only what the roots reach by name stays, methods as well: a name that
anything kept reads is taken to be read of every class.
"""

import ast
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

PACKAGE = Path(__file__).parent
_SHAPES = ("Float", "Int")  # jaxtyping's


def bundle(modules: Sequence[str], roots: Collection[str], *, first: str, note: str) -> str:
    """The source of one file.

    Parameters
    ----------
    modules
        Names within collabify; each after those that it imports.
    roots
        Names of what must be there, functions, classes and methods alike.
    first
        A module that goes before all imports, whole.
    note
        What the file says of itself.
    """
    trees = {name: _parsed(name) for name in modules}
    owners = Counter(name for tree in trees.values() for name in set(_tops(tree)))
    names = {
        module: {name: _own(name, module) for name in _tops(tree) if owners[name] > 1}
        for module, tree in trees.items()
    }
    imports: dict[str, ast.Import | ast.ImportFrom] = {}
    parts: list[ast.stmt] = []
    for module, tree in trees.items():
        foreign, own = _apart(tree)
        imports |= foreign
        flat = _Flat(names[module], dict(_inner(tree, trees)), names)
        parts += [flat.visit(part) for part in own]
    kept = _reached(parts, set(roots))
    read = set(_names(kept))
    needed = _joined(statement for name, statement in imports.items() if name in read)
    body = [ast.Expr(ast.Constant(f"{note}\n")), *_parsed(first).body[1:], *needed, *kept]
    return ast.unparse(ast.fix_missing_locations(ast.Module(body, []))) + "\n"


def _parsed(module: str) -> ast.Module:
    path = PACKAGE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _own(name: str, module: str) -> str:
    return f"{name}_{module.rpartition('.')[2]}"


def _defined(part: ast.stmt) -> tuple[str, ...]:
    """The names that a statement of a module defines."""
    if isinstance(part, (ast.FunctionDef, ast.ClassDef)):
        return (part.name,)
    targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
    return tuple(target.id for target in targets if isinstance(target, ast.Name))


def _tops(tree: ast.Module) -> Iterator[str]:
    for part in tree.body:
        yield from (name for name in _defined(part) if name != "__all__")


def _apart(
    tree: ast.Module,
) -> tuple[dict[str, ast.Import | ast.ImportFrom], list[ast.stmt]]:
    """Imports of other packages, by the name that each binds, and what the module defines."""
    imports: dict[str, ast.Import | ast.ImportFrom] = {}
    for part in tree.body:
        for alias in part.names if isinstance(part, (ast.Import, ast.ImportFrom)) else ():
            bound = alias.asname or alias.name
            if isinstance(part, ast.ImportFrom):
                imports[bound] = ast.ImportFrom(part.module, [alias], 0)
            else:
                imports[bound.partition(".")[0]] = ast.Import([alias])
    own = [part for part in tree.body if _defined(part) and _defined(part) != ("__all__",)]
    return {n: i for n, i in imports.items() if not _is_inner(i)}, own


def _is_inner(part: ast.stmt) -> bool:
    return isinstance(part, ast.ImportFrom) and (part.module or "").startswith("collabify")


def _inner(tree: ast.Module, modules: Collection[str]) -> Iterator[tuple[str, str]]:
    """Names that stand for one of the modules."""
    for part in tree.body:
        if isinstance(part, ast.ImportFrom) and _is_inner(part):
            package = (part.module or "").removeprefix("collabify").removeprefix(".")
            for alias in part.names:
                if f"{package}.{alias.name}" in modules:
                    yield alias.name, f"{package}.{alias.name}"


def _joined(imports: Iterable[ast.Import | ast.ImportFrom]) -> list[ast.stmt]:
    """Imports in order, those from one module together."""
    plain: set[str] = set()
    found: dict[str, set[str]] = {}
    for part in imports:
        names = {ast.unparse(alias) for alias in part.names}
        if isinstance(part, ast.Import):
            plain |= names
        else:
            found[str(part.module)] = found.get(str(part.module), set()) | names
    lines = [f"import {name}" for name in sorted(plain)]
    lines += [f"from {name} import {', '.join(sorted(found[name]))}" for name in sorted(found)]
    return ast.parse("\n".join(lines)).body


class _Flat(ast.NodeTransformer):
    """A module's statements as they read beside those of the others."""

    def __init__(
        self,
        own: Mapping[str, str],
        modules: Mapping[str, str],
        names: Mapping[str, Mapping[str, str]],
    ) -> None:
        self.own, self.modules, self.names = own, modules, names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.own.get(node.id, node.id)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.col_offset == 0:
            node.name = self.own.get(node.name, node.name)
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.name = self.own.get(node.name, node.name)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id in self.modules:
            names = self.names[self.modules[node.value.id]]
            return ast.Name(names.get(node.attr, node.attr), node.ctx)
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        shaped = isinstance(node.value, ast.Name) and node.value.id in _SHAPES
        if shaped and isinstance(node.slice, ast.Tuple):
            return node.slice.elts[0]
        return self.generic_visit(node)


def _names(parts: Iterable[ast.AST]) -> Iterator[str]:
    for part in parts:
        yield from (node.id for node in ast.walk(part) if isinstance(node, ast.Name))


def _attributes(parts: Iterable[ast.AST]) -> Iterator[str]:
    for part in parts:
        yield from (node.attr for node in ast.walk(part) if isinstance(node, ast.Attribute))


def _reached(parts: Sequence[ast.stmt], roots: set[str]) -> list[ast.stmt]:
    """What can be reached, in order; methods that cannot are taken out of their classes."""
    names, attributes, before = set(roots), set(roots), -1
    while len(names) + len(attributes) > before:
        before = len(names) + len(attributes)
        kept = [part for part in parts if names & set(_defined(part))]
        pieces = [piece for part in kept for piece in _pieces(part, attributes)]
        names |= set(_names(pieces))
        attributes |= set(_attributes(pieces))
    for part in kept:
        if isinstance(part, ast.ClassDef):
            part.body = [piece for piece in part.body if _stays(piece, attributes)]
    return kept


def _pieces(part: ast.stmt, attributes: Collection[str]) -> Iterator[ast.AST]:
    if not isinstance(part, ast.ClassDef):
        yield part
        return
    yield from (*part.bases, *part.decorator_list)
    yield from (piece for piece in part.body if _stays(piece, attributes))


def _stays(piece: ast.stmt, attributes: Collection[str]) -> bool:
    if not isinstance(piece, ast.FunctionDef):
        return True
    return piece.name in attributes or piece.name.startswith("__")
