"""How are experiment trackers told that a trial is no experiment? By the variables that they document.

In: nothing. Out: what a trial's environment has in the place of the user's. A user's own setting gives way in trials,
which record nothing whatever it says; a run has it untouched. What the script itself passes to a tracker
(`wandb.init(mode="online")`, `mlflow.set_tracking_uri`) goes before every variable and cannot be helped.
"""

from __future__ import annotations

SWITCHES: dict[str, str] = {
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "WEAVE_DISABLED": "true",
    "COMET_AUTO_LOG_DISABLE": "1",  # `disabled` of an experiment: nothing goes to the network
    "COMET_START_ONLINE": "0",
    "COMET_MODE": "DISABLED",  # read by Hugging Face's Trainer, not by Comet
    "NEPTUNE_MODE": "debug",  # `neptune-scale` says `disabled`, and takes any word but two for it
    "MLFLOW_TRACKING_URI": "",  # as if it were not set: MLflow's own files in the working folder, which is isolated
    "MLFLOW_REGISTRY_URI": "",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "CLEARML_OFFLINE_MODE": "1",
    "DVC_STUDIO_OFFLINE": "true",
    "DVC_EXP_AUTO_PUSH": "false",
    "SWANLAB_MODE": "disabled",
}
"""Documented variables by which trackers are switched off, or kept to local files."""

FORGOTTEN: tuple[str, ...] = (
    "MLFLOW_RUN_ID",
    "MLFLOW_EXPERIMENT_ID",
    "TRACKIO_SPACE_ID",
    "TRACKIO_SERVER_URL",
    "TRACKIO_WEBHOOK_URL",
)
"""Variables that name a place to send things to, which nothing else switches off, or a run that is not here."""

QUIET_TRACKERS: dict[str, str | None] = {**SWITCHES, **dict.fromkeys(FORGOTTEN)}
"""What a trial's environment has on top of the user's; None takes a variable away."""
