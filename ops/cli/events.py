"""Events in a few words, as a policy's history shows them."""

from __future__ import annotations

from typing import Any


def what_happened(body: dict[str, Any]) -> str:
    """An event in a few words; one of a later release by its name."""
    match body["t"]:
        case "PolicyCreated":
            return f"created over {body['base']}"
        case "RevisionPublished":
            return f"published revision {body['revision']} ({body['artifact']['digest'][:12]})"
        case "ChannelMoved" if body.get("target"):
            return f"moved {body['channel']} to {_arms(body)}"
        case "ChannelMoved":
            return f"let {body['channel']} follow latest"
        case "ChannelRemoved":
            return f"removed {body['channel']}"
        case "PolicyRetired":
            return "retired"
        case "PolicyRestored":
            return "restored"
        case "PolicyRenamed":
            return f"renamed from {body['policy']} to {body['to']}"
        case "ForwardDropped":
            return f"freed the name {body['name']}"
        case "LabelsChanged":
            return _labels(body)
        case "WriterChanged":
            return f"is written by {body['writer']}"
        case "RetentionChanged":
            return f"keeps {retention(body.get('retention'))}"
        case "RevisionsRetired":
            return f"retired revision {', '.join(map(str, body['revisions']))}"
        case "RevisionRestored":
            return f"restored revision {body['revision']}"
        case "RecordRetained":
            return f"keeps {body['record']['kind']} {body['record']['uri']}"
        case "RecordReleased":
            return f"released {body['kind']} {body['uri']}"
        case other:
            return str(other)


def retention(kept: dict[str, Any] | None) -> str:
    """``the last 5, and what is younger than 7 days``."""
    if not kept:
        return "every revision"
    young = f", and what is younger than {kept['keep_days']:g} days" if kept.get("keep_days") else ""
    return f"the last {kept['keep_last']}{young}"


def _arms(body: dict[str, Any]) -> str:
    arms = ", ".join(f"{arm['revision']} (weight {arm.get('weight', 1)})" for arm in body["target"])
    return f"{arms}, seed {body['seed']}" if body.get("seed") else arms


def _labels(body: dict[str, Any]) -> str:
    set_ = [f"{key}={value}" for key, value in body.get("labels", {}).items()]
    return "labelled " + ", ".join(set_ + [f"without {key}" for key in body.get("removed", ())])
