"""To the Hub and back: a model's files in one commit, and what went wrong in one line.

Everything is uploaded first, and then appears in one commit: a repository never holds half a model,
whatever breaks off. What was uploaded is not sent again by the next try.
"""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import (
    _CACHED_NO_EXIST,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_token,
    hf_hub_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from collabify.errors import CollabifyError, HubError, OptionError, first_line
from collabify.modelcard import MODELING_FILE, is_generated

CARD_FILE, CONFIG_FILE, RECORD_FILE = "README.md", "config.json", "collabify.json"
# What transformers would load: files of an earlier push must not stand beside those of this one.
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*")

Content = Path | bytes


@dataclass(frozen=True)
class Pushed:
    """What a push did.

    Parameters
    ----------
    repo, url
        The repository, and where to look at it.
    commit
        The newest one; that of an earlier push where nothing had changed.
    pull_request
        Where it waits to be merged, or ``None``.
    card
        Whose README.md is there: ``generated``, ``folder`` or ``hub``.
    deleted
        Weights of an earlier push, and code that this one comes without.
    """

    repo: str
    url: str
    commit: str
    pull_request: str | None
    card: str
    deleted: tuple[str, ...] = ()


def check_name(repo: str) -> None:
    """Refuse what is no name of a repository.

    Raises
    ------
    OptionError
    """
    try:
        validate_repo_id(repo)
        if repo.count("/") != 1:
            raise HFValidationError("it has no user or organisation")
    except HFValidationError as error:
        raise OptionError(
            f"{repo!r} must be USER/NAME, of letters, digits, '-', '_' and '.' "
            f"({first_line(error)}). Write another name."
        ) from error


def check_request(revision: str | None, *, create_pr: bool) -> None:
    """Refuse options that contradict each other, and a branch without a name.

    Raises
    ------
    OptionError
    """
    if revision is not None and not revision.strip():
        raise OptionError(f"revision={revision!r} must name a branch. Leave out --revision.")
    if create_pr and revision is not None:
        raise OptionError(
            f"revision={revision!r} and a pull request: those are made for the main branch. "
            "Leave out --revision or --create-pr."
        )


def push(
    repo: str,
    files: Mapping[str, Content],
    *,
    card: str,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    create_pr: bool = False,
) -> Pushed:
    """Upload files and put them into a repository with one commit; it is made if need be.

    Parameters
    ----------
    repo
        ``user/name``.
    files
        By their path in the repository.
    card
        Whose README.md is among them: ``folder``, which replaces one on the Hub, or ``generated``,
        which gives way to one that was edited there.
    private
        Whether only its owners may see it; one that is public already is refused.
    revision
        Branch, made if need be; by default ``main``.
    message
        Of the commit.
    create_pr
        Propose it in a pull request.

    Raises
    ------
    OptionError
        Where ``repo`` is no name, or options contradict each other.
    HubError
        Where the Hub cannot be reached or refuses.
    """
    check_name(repo)
    check_request(revision, create_pr=create_pr)
    check_ready(repo)
    api = HfApi(library_name="collabify")
    with told(repo, "what was uploaded is not sent twice"):
        made = api.create_repo(repo, private=private or None, exist_ok=True)
        if made.repo_type != "model":
            raise HubError(
                f"{repo!r} is the name of a {made.repo_type} already. Choose another name."
            )
        if private and not api.model_info(repo).private:
            raise HubError(
                f"{repo!r} is there already, and everybody can see it. "
                "Make it private on its page, choose another name, or leave out --private."
            )
        is_new = revision is not None and _make_branch(api, repo, revision)
        there = api.model_info(repo, revision=revision)
        names = [sibling.rfilename for sibling in there.siblings or ()]
        is_another = CONFIG_FILE in names and RECORD_FILE not in names
        if is_another and not (is_new or create_pr):
            raise HubError(
                f"{repo!r} holds a model that collabify did not make. Choose another name, a new "
                "branch (--revision), or propose it in a pull request: --create-pr"
            )
        theirs = card == "generated" and CARD_FILE in names and not is_another
        if theirs and _edited(repo, there.sha):
            files = {name: content for name, content in files.items() if name != CARD_FILE}
            card = "hub"
        old = [name for name in names if _is_replaced(name) and name not in files]
        commit = api.create_commit(
            repo,
            [
                *(CommitOperationAdd(name, content) for name, content in files.items()),
                *(CommitOperationDelete(name) for name in old),
            ],
            commit_message=message or "Upload model made with collabify",
            revision=revision,
            create_pr=create_pr,
            parent_commit=there.sha,
        )
    url = f"{constants.ENDPOINT}/{repo}"
    url += "" if revision is None else f"/tree/{revision}"
    return Pushed(repo, url, commit.oid, commit.pr_url, card, tuple(old))


def check_ready(repo: str) -> None:
    """Refuse to push without a network or a token, before anything takes time.

    Raises
    ------
    HubError
    """
    if constants.HF_HUB_OFFLINE:
        raise HubError(
            f"HF_HUB_OFFLINE is set, so {repo!r} cannot be pushed to. Unset it, or pass --dry-run."
        )
    if get_token() is None:
        raise HubError(
            f"There is no token to push to {repo!r} with. Run: hf auth login, or set HF_TOKEN."
        )


def download(
    repo: str, name: str, revision: str | None = None, token: str | bool | None = None
) -> Path | None:
    """One small file of a repository, from the cache where it is there; ``None``: it has none.

    Raises
    ------
    HubError
        Where the Hub cannot be reached or refuses.
    """
    with told(repo):
        try:
            return Path(hf_hub_download(repo, name, revision=revision, token=token))
        except RemoteEntryNotFoundError:
            return None
        except LocalEntryNotFoundError:  # the Hub was not asked, or did not answer
            if try_to_load_from_cache(repo, name, revision=revision) is _CACHED_NO_EXIST:
                return None
            raise


def _make_branch(api: HfApi, repo: str, branch: str) -> bool:
    """Make a branch where there is none; whether it was."""
    try:
        api.model_info(repo, revision=branch)
    except RevisionNotFoundError:
        if branch.startswith("refs/"):
            raise
        api.create_branch(repo, branch=branch, exist_ok=True)
        return True
    return False


def _edited(repo: str, commit: str | None) -> bool:
    """Whether the card on the Hub is somebody's own."""
    return not is_ours(Path(hf_hub_download(repo, CARD_FILE, revision=commit)))


def is_ours(card: Path) -> bool:
    """Whether a README.md is as :func:`collabify.modelcard.model_card` wrote it."""
    try:
        return is_generated(card.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _is_replaced(name: str) -> bool:
    """Whether a push replaces it, or deletes it where it has none."""
    return "/" not in name and any(
        fnmatchcase(name, pattern) for pattern in (*WEIGHTS, MODELING_FILE)
    )


@contextmanager
def told(repo: str, promise: str = "") -> Iterator[None]:
    """Within: errors of huggingface_hub become a :class:`HubError` that says what to do.

    Parameters
    ----------
    repo
        ``user/name``.
    promise
        What running the same command again is like, after a connection that broke.
    """
    try:
        yield
    except CollabifyError:
        raise
    except (OSError, RuntimeError, ValueError, _HTTPError) as error:
        raise HubError(_reason(error, repo, promise)) from error


# What httpx raises, whichever of its versions huggingface_hub has.
_HTTPError: Any = HfHubHTTPError.__bases__[0]


def known_reason(error: BaseException, repo: str) -> str | None:
    """Why the Hub did not do it, and what to do, in one line; ``None`` where it did not say.

    Parameters
    ----------
    error
        Anything, with an error of huggingface_hub in the chain of its causes.
    repo
        ``user/name``.
    """
    for each in _causes(error):
        if isinstance(each, UnicodeEncodeError) and not (get_token() or "").isascii():
            return (
                "The token (HF_TOKEN, or that of hf auth login) has a character that no token has. "
                "Run: hf auth login --force"
            )
        if isinstance(each, OfflineModeIsEnabled):
            return (
                f"{repo!r} is not in the cache, or not all of it, and HF_HUB_OFFLINE is set. "
                "Unset it, or download the model first."
            )
        if isinstance(each, RevisionNotFoundError):
            return f"{repo!r} has no such branch, tag or commit. Change --revision."
        if isinstance(each, GatedRepoError):
            return f"{repo!r} asks for consent on its page first. Give it, then run: hf auth login"
        if isinstance(each, RepositoryNotFoundError):
            return f"{repo!r} does not exist, or is private and {_whose_token()}."
        if isinstance(each, HfHubHTTPError) and not isinstance(each, EntryNotFoundError):
            return _refused(each, repo)
        if "LFS batch API" in str(each):
            return _too_large(repo, str(each).rpartition("`")[2].strip())
        if "Invalid metadata" in str(each):
            said = " ".join(str(each).split()[4:])
            return f"The Hub does not take the metadata of README.md ({said}). Put them right."
    return None


def _reason(error: BaseException, repo: str, promise: str) -> str:
    """As :func:`known_reason`; what it does not know is a connection that broke, or stays odd."""
    causes = list(_causes(error))
    last = causes[-1]
    said = first_line(last) or type(last).__name__
    if isinstance(last, HFValidationError):
        return f"{repo!r} is no folder here, and no name on the Hub ({said}). Check its spelling."
    known = known_reason(error, repo)
    if known is not None:
        return known
    if isinstance(last, OSError) and last.errno in _LOCAL:
        return (
            f"{repo!r} cannot be kept in {constants.HF_HUB_CACHE} ({last.strerror}). "
            "Free space there, or set HF_HOME."
        )
    if isinstance(last, ValueError) and not any(isinstance(each, _BROKEN) for each in causes):
        return (
            f"What the Hub says of {repo!r} cannot be used ({said}). "
            "Run the same command again, or look at its page."
        )
    return (
        f"The connection to {constants.ENDPOINT} broke off at {repo!r} ({said}). "
        f"Run the same command again{': ' * bool(promise)}{promise}."
    )


_BROKEN = (_HTTPError, ConnectionError, TimeoutError)
_LOCAL = (errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS)


def _refused(error: HfHubHTTPError, repo: str) -> str:
    """A status of HTTP in words."""
    status = error.response.status_code
    said = first_line(Exception(error.server_message or error.response.reason_phrase))
    if status == 401:
        return f"The Hub does not know this token ({said}). Run: hf auth login --force"
    if status == 403:
        return (
            f"This token may not write to {repo!r} ({said}). Choose a name of your own "
            "(hf auth whoami), take a token that may write, or propose it: --create-pr"
        )
    if status == 409:
        return f"{repo!r} is taken ({said}). Choose another name."
    if status == 412:
        return f"{repo!r} was changed by somebody else meanwhile. Run the same command again."
    if status == 413:
        return _too_large(repo, said)
    return f"The Hub answered {status} to {repo!r} ({said}). Try the same command again later."


def _too_large(repo: str, said: str) -> str:
    return (
        f"The Hub does not take a file of this size to {repo!r} ({said}). "
        "Save the model in shards: model.save_pretrained(DIR, max_shard_size='5GB')"
    )


def _whose_token() -> str:
    if get_token() is None:
        return "there is no token. Check its name, or run: hf auth login"
    return "this token may not see it. Check its name, or run: hf auth login --force"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from, whether it was raised from that or while it was handled."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__
