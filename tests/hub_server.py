"""A Hub on this machine: as much of its protocol as pushing, loading and their failures need.

Repositories are dictionaries of bytes, commits are snapshots. Large files go by LFS, as on the Hub:
asked for in a batch, put one by one, named by a commit, and not sent again once they are stored.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from huggingface_hub import ModelCardData

OWNER, READER = "hf_owner", "hf_reader"  # tokens: one may write to "me", the other only read
SMALL = 2048  # bytes; larger files go by LFS


@dataclass
class Repo:
    """One repository."""

    private: bool = False
    kind: str = "model"
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes], branch: str, message: str) -> str:
        seed = f"{len(self.commits)}{branch}{message}{sorted(files)}"
        sha = hashlib.sha1(seed.encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        self.messages.append(message)
        return sha

    def at(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)


@dataclass
class Hub:
    """What the server knows, and how it is to misbehave."""

    repos: dict[str, Repo] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)  # LFS, by sha256
    log: list[str] = field(default_factory=list)  # "PUT /lfs/..." in order
    broken: dict[str, int] = field(default_factory=dict)  # beginning of a log line -> times to drop
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)  # ... -> status and message
    gated: set[str] = field(default_factory=set)
    url: str = ""

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        repo = self.repos[name]
        return repo.commits[repo.at(revision) or ""]

    def add(self, name: str, files: dict[str, bytes], **options: Any) -> str:
        """Make a repository as it is after a push; its commit."""
        repo = self.repos.setdefault(name, Repo(**options))
        return repo.commit(files, "main", "as it was")

    def count(self, start: str) -> int:
        return sum(line.startswith(start) for line in self.log)


class RefusalError(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, message: str, code: str | None = None, **body: Any) -> None:
        super().__init__(message)
        self.status, self.code, self.body = status, code, body


def blob_id(content: bytes) -> str:
    """What git calls a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def handle_one(self) -> None:
        parts = urlsplit(self.path)
        path, query = unquote(parts.path), parse_qs(parts.query)
        line = f"{self.command} {path}"
        self.hub.log.append(line)
        size = int(self.headers.get("Content-Length") or 0)
        for start, left in self.hub.broken.items():
            if line.startswith(start) and left:
                self.hub.broken[start] -= 1
                self.rfile.read(size // 2)
                self.close_connection = True
                self.connection.close()
                return
        body = self._body(size)
        try:
            for start, (status, message) in self.hub.answers.items():
                if line.startswith(start):
                    raise RefusalError(status, message)
            self.route(path, query, body)
        except RefusalError as refusal:
            headers = {"X-Error-Message": str(refusal)}
            if refusal.code:
                headers["X-Error-Code"] = refusal.code
            self.answer({"error": str(refusal), **refusal.body}, refusal.status, headers)

    do_GET = do_HEAD = do_POST = do_PUT = handle_one  # noqa: N815

    def _body(self, size: int) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(size)
        body = b""
        while length := int(self.rfile.readline(), 16):
            body += self.rfile.read(length)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def answer(
        self, content: Any, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        headers = {"Content-Length": str(len(data)), **(headers or {})}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    @property
    def token(self) -> str | None:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given and given not in (OWNER, READER):
            raise RefusalError(401, "Invalid credentials in Authorization header")
        return given or None

    def repo(self, name: str, *, write: bool = False) -> Repo:
        repo, token = self.hub.repos.get(name), self.token
        if repo is None or repo.kind != "model" or (repo.private and token != OWNER):
            status = 401 if token is None else 404
            raise RefusalError(status, "Repository not found", "RepoNotFound")
        if name in self.hub.gated:
            raise RefusalError(403, "Access to this model is restricted", "GatedRepo")
        if write and token != OWNER:
            raise RefusalError(403, "Forbidden: you need write access")
        return repo

    def route(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
        words = path.strip("/").split("/")
        if path == "/api/repos/create":
            self.create(json.loads(body))
        elif path == "/api/validate-yaml":
            self.validate(json.loads(body)["content"])
        elif words[:2] == ["api", "models"] and len(words) >= 4:
            verb, *rest = words[4:] or ["revision", "main"]
            self.model("/".join(words[2:4]), verb, "/".join(rest), query, body)
        elif words[0] == "lfs":
            if sha256(body) != words[1]:
                raise RefusalError(400, "this is not what was announced")
            self.hub.stored[words[1]] = body
            self.answer(b"")
        elif path.endswith(".git/info/lfs/objects/batch"):
            self.batch(json.loads(body))
        elif len(words) > 4 and words[2] == "resolve":
            self.resolve("/".join(words[:2]), words[3], "/".join(words[4:]))
        else:
            raise RefusalError(404, f"no such path: {path}", "EntryNotFound")

    def create(self, asked: dict[str, Any]) -> None:
        if self.token is None:
            raise RefusalError(401, "Invalid username or password.")
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.hub.repos:
            kind = self.hub.repos[name].kind
            prefix = "" if kind == "model" else f"{kind}s/"
            raise RefusalError(
                409, "You already created this repo", url=f"{self.hub.url}/{prefix}{name}"
            )
        if asked["organization"] != "me" or self.token != OWNER:
            raise RefusalError(
                403, "You don't have the rights to create a model under this namespace"
            )
        self.hub.repos[name] = Repo(private=asked.get("visibility") == "private")
        self.hub.repos[name].commit({".gitattributes": b""}, "main", "initial commit")
        self.answer({"url": f"{self.hub.url}/{name}"})

    def validate(self, content: str) -> None:
        try:
            _, head, _ = content.split("---\n", 2)
            ModelCardData(**yaml.safe_load(head))
            self.answer({"errors": [], "warnings": []})
        except Exception as error:
            body = {"errors": [{"message": str(error).split("\n")[0]}], "warnings": []}
            raise RefusalError(400, "Invalid metadata", **body) from error

    def model(
        self, name: str, verb: str, rest: str, query: dict[str, list[str]], body: bytes
    ) -> None:
        if verb in ("preupload", "commit", "branch"):
            proposed = bool(query.get("create_pr"))
            repo = self.repo(name, write=not proposed)
            getattr(self, verb)(repo, name, rest, body, proposed=proposed)
            return
        repo = self.repo(name)
        revision, _, folder = rest.partition("/")
        sha = repo.at(revision)
        if sha is None:
            raise RefusalError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        files = repo.commits[sha]
        if verb == "tree" and not folder:
            self.answer([self.entry(path, content) for path, content in files.items()])
        elif verb == "tree":
            raise RefusalError(404, f"no such folder: {folder}", "EntryNotFound")
        else:
            siblings = [{"rfilename": path} for path in files]
            self.answer({"id": name, "sha": sha, "private": repo.private, "siblings": siblings})

    def entry(self, path: str, content: bytes) -> dict[str, Any]:
        found = {"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}
        if len(content) > SMALL:
            found["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 134}
        return found

    def preupload(self, repo: Repo, name: str, at: str, body: bytes, *, proposed: bool) -> None:
        there = repo.commits[repo.at(at) or ""]
        answer = []
        for asked in json.loads(body)["files"]:
            large, content = asked["size"] > SMALL, there.get(asked["path"])
            oid = None if content is None else (sha256 if large else blob_id)(content)
            mode = {"uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}
            answer.append({"path": asked["path"], **mode})
        self.answer({"files": answer})

    def batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for each in asked["objects"]:
            actions = {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}"}}
            found = {} if each["oid"] in self.hub.stored else {"actions": actions}
            objects.append({**each, **found})
        self.answer({"transfer": "basic", "objects": objects})

    def commit(self, repo: Repo, name: str, at: str, body: bytes, *, proposed: bool) -> None:
        files = dict(repo.commits[repo.at(at) or ""])
        message = ""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
                if value.get("parentCommit") not in (None, repo.at(at)):
                    raise RefusalError(
                        412, "A commit has happened since. Please refresh and try again."
                    )
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.stored:
                    raise RefusalError(400, f"{value['path']} was not uploaded")
                files[value["path"]] = self.hub.stored[value["oid"]]
            else:
                del files[value["path"]]
        branch = f"refs/pr/{len(repo.branches)}" if proposed else at
        sha = repo.commit(files, branch, message)
        url = f"{self.hub.url}/{name}"
        proposal = f"{url}/discussions/1" if proposed else None
        self.answer(
            {"commitUrl": f"{url}/commit/{sha}", "commitOid": sha, "pullRequestUrl": proposal}
        )

    def branch(self, repo: Repo, name: str, at: str, body: bytes, *, proposed: bool) -> None:
        if at in repo.branches:
            raise RefusalError(409, "Reference already exists")
        repo.branches[at] = repo.branches["main"]
        self.answer({})

    def resolve(self, name: str, revision: str, path: str) -> None:
        repo = self.repo(name)
        sha = repo.at(revision)
        if sha is None:
            raise RefusalError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        content = repo.commits[sha].get(path)
        if content is None:
            said = {"X-Error-Code": "EntryNotFound", "X-Error-Message": f"no such file: {path}"}
            self.answer(b"", 404, said | {"X-Repo-Commit": sha})
            return
        headers = {"X-Repo-Commit": sha, "ETag": f'"{sha256(content)}"'}
        wanted = self.headers.get("Range")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            content = content[int(first) : int(last) + 1 if last else None]
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(content) - 1}/*"
        self.answer(content, 206 if wanted else 200, headers)


@contextmanager
def serving() -> Iterator[Hub]:
    """A Hub on a free port of this machine, while it is used."""
    hub = Hub()
    handler = type("OwnHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def environment(hub: Hub, home: Any, token: str | None = OWNER) -> dict[str, str]:
    """What makes huggingface_hub in another process talk to ``hub``, and to nothing else."""
    own = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",
    }
    return own if token is None else {**own, "HF_TOKEN": token}


def patch(hub: Hub, home: Any, monkeypatch: Any, token: str | None = OWNER) -> None:
    """The same in this process."""
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    for name, value in {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", hub.url)  # behind its functions
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
