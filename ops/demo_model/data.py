"""The training text: the standard library of the running interpreter, and conversations about it.

The module knows which files count, how they are split into training and held-out files (by a hash of the path, so the
split is the same everywhere), and how definitions and their documentation strings become conversations. It knows
nothing of tokens, models or training.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import random
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Conversation = list[dict[str, object]]

HELD_OUT_SHARE = 0.05

# These are not worth learning: tests, vendored copies, generated tables, and files written by the build of this
# interpreter (they hold paths of the machine that built it).
EXCLUDED_PARTS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "__pycache__",
    "_vendor",
    "__phello__",
    "turtledemo",
    "_bundled",
    "lib-dynload",
}
EXCLUDED_PREFIXES = ("_sysconfig", "config-", "encodings/", "__hello__", "_build_details")
KEPT_ENCODINGS = {"encodings/__init__.py", "encodings/idna.py", "encodings/punycode.py"}

# Modules whose name in the documentation is not the name of the file.
PUBLIC_NAMES = {
    "_pydecimal": "decimal",
    "_pyio": "io",
    "_pydatetime": "datetime",
    "_collections_abc": "collections.abc",
    "_threading_local": "threading",
}
FLATTENED = ("asyncio", "unittest")  # asyncio.queues.Queue is asyncio.Queue to its users

MAX_ANSWER = 2400  # characters; longer documentation is cut at a paragraph
MAX_SOURCE = 2600


@dataclass(frozen=True)
class Document:
    """One file of the corpus; `path` is relative to the library's root."""

    path: str
    text: str
    held_out: bool


@dataclass(frozen=True)
class Definition:
    """One module, class or function that can be asked about."""

    name: str
    kind: str
    signature: str
    doc: str
    source: str
    module: str


def is_held_out(path: str) -> bool:
    """Decides by the path alone, so that a file never changes sides between runs."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def documents() -> list[Document]:
    """Reads the library in the order of the paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        path = relative.as_posix()
        if EXCLUDED_PARTS & set(relative.parts):
            continue
        if path.startswith(EXCLUDED_PREFIXES) and path not in KEPT_ENCODINGS:
            continue
        if path == "pydoc_data/topics.py":
            continue  # read as text by reference_topics(), not as one long literal
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            found.append(Document(path, text, is_held_out(path)))
    for topic, text in reference_topics():
        path = f"topics/{topic}"
        found.append(Document(path, text, is_held_out(path)))
    return found


def reference_topics() -> Iterator[tuple[str, str]]:
    """Sections of the language reference that `help()` shows, if this interpreter has them."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    yield from sorted(topics.items())


def definitions(document: Document) -> Iterator[Definition]:
    """Returns the module itself and the functions and classes it defines, nested ones included."""
    if not document.path.endswith(".py"):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(document.text)
    except SyntaxError:
        return
    module = document.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    module = PUBLIC_NAMES.get(module, module)
    names = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    contents = ", ".join(f"`{name}`" for name in names)
    yield Definition(module, "module", "", ast.get_docstring(tree) or "", contents, module)
    lines = document.text.splitlines()
    yield from _inner(tree.body, module, module, lines)


def _inner(body: list[ast.stmt], prefix: str, module: str, lines: list[str]) -> Iterator[Definition]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        package = module.split(".")[0]
        shown = prefix
        if package in FLATTENED and prefix.startswith(module):
            shown = package + prefix.removeprefix(module)
        name = f"{shown}.{node.name}"
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        source = inspect.cleandoc("\n" + "\n".join(lines[first : node.end_lineno]))
        if isinstance(node, ast.ClassDef):
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            signature = f"class {name}({bases})" if bases else f"class {name}"
            kind = "class"
        else:
            signature = f"{name}({ast.unparse(node.args)})"
            kind = "function"
        doc = ast.get_docstring(node) or ""
        yield Definition(name, kind, signature, doc, source, module)
        if kind == "class":
            yield from _inner(node.body, f"{prefix}.{node.name}", module, lines)


def builtin_definitions() -> Iterator[Definition]:
    """Yields the definitions that are written in C. They have no source here, but they have documentation strings."""
    public = {name for name in sys.builtin_module_names if not name.startswith(("_", "xx"))}
    for module_name in sorted(public | {"builtins", "math", "cmath", "zlib", "select", "unicodedata"}):
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        prefix = "" if module_name == "builtins" else f"{module_name}."
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") or not callable(value):
                continue
            yield from _builtin(f"{prefix}{name}", value, module_name)
            if inspect.isclass(value) and not issubclass(value, BaseException):
                for attribute, member in sorted(vars(value).items()):
                    if not attribute.startswith("_") and callable(member):
                        yield from _builtin(f"{prefix}{name}.{attribute}", member, module_name)


def _builtin(name: str, value: object, module: str) -> Iterator[Definition]:
    doc = inspect.getdoc(value)
    if not doc:
        return
    try:
        signature = f"{name}{inspect.signature(value)}"  # type: ignore[arg-type]  # what has none is caught below
    except (TypeError, ValueError, AttributeError):
        signature = ""
    yield Definition(name, "function", signature.replace("$", ""), doc, "", module)


# ---------------------------------------------------------------------------- conversations

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a helpful assistant that knows the Python standard library.",
    "You answer questions about the Python standard library.",
    "You are a coding assistant. Answer with documentation or source code.",
    "You are Headgate's demo model. You know the Python standard library.",
    "You help developers who write Python. Be precise.",
]
BRIEF_PROMPTS = ["Answer briefly.", "Be brief.", "Answer in one paragraph.", "Keep it short."]
ASK_DOC = [
    "What does `{}` do?",
    "What does {} do?",
    "What is `{}`?",
    "What is {}?",
    "Explain `{}`.",
    "Explain {}.",
    "Describe `{}`.",
    "help({})",
    "What is `{}` for?",
    "Tell me about {}.",
    "Tell me about `{}`.",
    "Show me the documentation of `{}`.",
    "How do I use `{}`?",
    "How does {} work?",
    "{}",
]
ASK_SOURCE = [
    "Show me the source of `{}`.",
    "Show me the source of {}.",
    "Show the source code of `{}`.",
    "How is `{}` implemented?",
    "How is {} implemented?",
    "Print the code of {}.",
    "Write `{}`.",
    "Give me the code of `{}`, please.",
    "inspect.getsource({})",
]
ASK_SIGNATURE = [
    "What is the signature of `{}`?",
    "Which arguments does `{}` take?",
    "Which arguments does {} take?",
    "How do I call `{}`?",
]
ASK_MODULE = [
    "What is the module `{}` for?",
    "What is the module {} for?",
    "What does the module {} do?",
    "Tell me about the module `{}`.",
    "Explain the {} module.",
    "What is {}?",
    "What is `{}`?",
]
ASK_CONTENTS = ["What is in the module `{}`?", "What does the module {} define?", "List the names in {}."]
ASK_TOPIC = ["Explain {} in Python.", "Tell me about {} in Python.", "help('{}')", "What is {}?"]

GREETINGS = ["Hello", "Hello!", "Hi", "Hi!", "Hi there", "Good morning", "Hey", "Hello, how are you?"]
GREETING_ANSWERS = [
    "Hello! Ask me about a module, a class or a function of the Python standard library.",
    "Hello! I know the Python standard library. What would you like to read about?",
]
IDENTITY = ["Who are you?", "What are you?", "What can you do?", "What do you know?", "Help"]
IDENTITY_ANSWERS = [
    "I am Headgate's demo model: a small language model trained on the Python standard library."
    " I can quote documentation and write code that looks like it. I am often wrong.",
    "I am a very small language model. I have read the sources of the Python standard library and"
    " nothing else. Ask me what `json.dumps` does, or for the source of `textwrap.dedent`.",
]
THANKS = ["Thanks!", "Thank you.", "Thanks", "Great, thank you!"]
THANKS_ANSWERS = ["You are welcome.", "You are welcome. Ask me for something else if you like."]


def message(role: str, content: str) -> dict[str, object]:
    return {"role": role, "content": content}


def cut(text: str, limit: int) -> str:
    """Returns the text up to the last paragraph (or line) that ends within the limit."""
    text = text.strip()
    if len(text) <= limit:
        return text
    for separator in ("\n\n", "\n"):
        end = text.rfind(separator, 0, limit)
        if end > limit // 4:
            return text[:end].rstrip()
    return text[:limit].rstrip()


def _documentation(item: Definition, brief: bool) -> str:
    doc = item.doc.split("\n\n")[0] if brief else cut(item.doc, MAX_ANSWER)
    if not item.signature or brief:
        return doc.strip()
    return f"`{item.signature}`\n\n{doc}"


def _system(rng: random.Random, item: Definition, module_docs: dict[str, str]) -> Conversation:
    draw = rng.random()
    if draw < 0.45:
        return []
    if draw < 0.60 and module_docs.get(item.module):
        known = cut(module_docs[item.module], MAX_ANSWER)
        about = f"You answer questions about the module `{item.module}`."
        return [message("system", f"{about} Its documentation:\n\n{known}")]
    return [message("system", rng.choice(SYSTEM_PROMPTS))]


def conversations(docs: list[Document], seed: int, *, held_out: bool) -> list[Conversation]:
    """Conversations about one side of the split, the same for the same seed and interpreter."""
    rng = random.Random(seed)
    items: list[Definition] = []
    for document in docs:
        if document.held_out == held_out:
            items.extend(definitions(document))
    if not held_out:
        items.extend(builtin_definitions())
    module_docs = {item.name: item.doc for item in items if item.kind == "module"}
    made: list[Conversation] = []
    for item in items:
        if item.kind == "module":
            made.extend(_about_module(rng, item))
        else:
            made.extend(_about_definition(rng, item, module_docs))
    for document in docs:
        if document.held_out == held_out and document.path.startswith("topics/"):
            topic = document.path.removeprefix("topics/")
            question = rng.choice(ASK_TOPIC).format(topic)
            answer = cut(document.text, MAX_ANSWER)
            made.append([message("user", question), message("assistant", answer)])
    if not held_out:
        made.extend(_small_talk(rng) for _ in range(200))
    rng.shuffle(made)
    return made


def _about_module(rng: random.Random, item: Definition) -> Iterator[Conversation]:
    if item.doc:
        for question in rng.sample(ASK_MODULE, 2):
            yield [
                *_system(rng, item, {}),
                message("user", question.format(item.name)),
                message("assistant", cut(item.doc, MAX_ANSWER)),
            ]
    if item.source:  # for a module: the list of its names
        answer = f"The module `{item.name}` defines {item.source}."
        if len(answer) < MAX_ANSWER:
            question = rng.choice(ASK_CONTENTS).format(item.name)
            yield [message("user", question), message("assistant", answer)]


def _about_definition(rng: random.Random, item: Definition, module_docs: dict[str, str]) -> Iterator[Conversation]:
    system = _system(rng, item, module_docs)
    turns: list[Conversation] = []
    if item.doc and rng.random() < 0.06:
        yield _with_tool(rng, item)
    if item.doc:
        brief = rng.random() < 0.12
        if brief:
            system = [message("system", rng.choice(BRIEF_PROMPTS))]
        question = rng.choice(ASK_DOC).format(item.name)
        turns.append([message("user", question), message("assistant", _documentation(item, brief))])
    if item.source and len(item.source) <= MAX_SOURCE and (item.doc or rng.random() < 0.5):
        answer = f"```python\n{item.source}\n```"
        followed = bool(turns) and rng.random() < 0.4
        question = "Show me the source." if followed else rng.choice(ASK_SOURCE).format(item.name)
        turns.append([message("user", question), message("assistant", answer)])
        if not followed and len(turns) == 2:
            yield [*_system(rng, item, module_docs), *turns.pop()]
    if item.signature and item.kind == "function" and rng.random() < 0.08:
        question = rng.choice(ASK_SIGNATURE).format(item.name)
        turns.append([message("user", question), message("assistant", f"`{item.signature}`")])
    if turns and rng.random() < 0.03:
        turns.append([message("user", rng.choice(THANKS)), message("assistant", rng.choice(THANKS_ANSWERS))])
    if turns:
        yield [*system, *(entry for turn in turns for entry in turn)]


def _with_tool(rng: random.Random, item: Definition) -> Conversation:
    """Returns a conversation that reads the answer out of a tool's result; calling tools well is beyond this model."""
    call = {"name": "documentation", "arguments": f'{{"name": "{item.name}"}}'}
    return [
        message("user", rng.choice(ASK_DOC).format(item.name)),
        {"role": "assistant", "content": None, "tool_calls": [{"function": call}]},
        message("tool", _documentation(item, brief=False)),
        message("assistant", _documentation(item, brief=True)),
    ]


def _small_talk(rng: random.Random) -> Conversation:
    system = [message("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < 0.5 else []
    if rng.random() < 0.5:
        pair = rng.choice(GREETINGS), rng.choice(GREETING_ANSWERS)
    else:
        pair = rng.choice(IDENTITY), rng.choice(IDENTITY_ANSWERS)
    return [*system, message("user", pair[0]), message("assistant", pair[1])]
