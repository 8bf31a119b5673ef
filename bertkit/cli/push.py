"""The command `bertkit push`, which publishes a model on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from bertkit.console import Console
from bertkit.errors import escape_line_breaks


def push_command(
    model: Path,
    name: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str = "",
    license: str = "",  # noqa: A002 - the metadata's own name
) -> None:
    """Publish a model on the Hugging Face hub.

    The model's files and its card are uploaded in one commit, and nothing else. Log in first with
    `hf auth login`, or set HF_TOKEN.

    Parameters
    ----------
    model
        A model directory, a run directory or an export.
    name
        The name on the hub, ORG/NAME; it is created if it does not exist.
    private
        Let only members of ORG see the model, if it is created.
    revision
        The branch to write; main if it is not given.
    message
        The message of the commit.
    license
        The license for the model card, such as apache-2.0; by default what the card says.
    """
    from bertkit.checkpoints.hub import push

    done = push(model, name, private=private, revision=revision, message=message, license=license)
    with Console() as console:
        if done.left_out:
            console.say(f"not uploaded: {', '.join(done.left_out)}")
        console.say(f"uploaded {len(done.files)} files: {', '.join(done.files)}")
    print(escape_line_breaks(f"{done.url} {done.commit}"))  # noqa: T201 - the result
