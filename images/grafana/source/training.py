"""The dashboard shows the speed of training, what the policy learns, ranks and checkpoints."""

from limits import LIMITS
from panels import RED, UP_DOWN, Json, dashboard, query, row, stat, timeline, timeseries

PER_PHASE = "tandem_train_phase_duration_seconds"
PER_STEP = "tandem_train_step_duration_seconds"


def of_last_step(title: str, metric: str, text: str, unit: str = "short", **more: object) -> Json:
    return timeseries(
        title,
        f"{text} Of the last optimizer step: `tandem_train_{metric}`.",
        unit,
        query(f"tandem_train_{metric}{{@pod}}", "{{pod}}"),
        **{"width": 6, "none": "not measured"} | more,
    )


def build() -> Json:
    return dashboard(
        "tandem-training",
        "Tandem / Training",
        "Speed of training, what the policy learns, ranks and checkpoints.",
        *_speed(),
        *_learning(),
        *_ranks(),
        *_checkpoints(),
    )


def _speed() -> list[Json]:
    return [
        row("Speed"),
        stat(
            "Step",
            "Optimizer steps that the running job has done: `tandem_train_step`.",
            "short",
            query("tandem_train_step{@pod}", "{{run}}", kind="instant"),
            none="no job",
        ),
        stat(
            "Steps of the job",
            "All optimizer steps of the running job: `tandem_train_steps`.",
            "short",
            query("tandem_train_steps{@pod}", "{{run}}", kind="instant"),
            none="no job",
        ),
        stat(
            "Mean step",
            f"Over the range shown: `{PER_STEP}`.",
            "s",
            query(
                f"sum(increase({PER_STEP}_sum{{@pod}}[$__range])) / "
                f"sum(increase({PER_STEP}_count{{@pod}}[$__range]))",
                "mean",
                kind="instant",
            ),
            none="no step",
        ),
        stat(
            "Since the last step",
            "Of the running job: `tandem_train_last_step_timestamp_seconds`. "
            "TandemTrainerStuck waits for four mean steps, 15 minutes at least.",
            "s",
            query(
                "time() - tandem_train_last_step_timestamp_seconds{@pod}", "{{run}}", kind="instant"
            ),
            none="no job",
            limits=[(RED, LIMITS["TandemTrainerStuck"])],
        ),
        stat(
            "Since the last heartbeat",
            "Of the rank that has been silent for longest: "
            "`tandem_job_last_progress_timestamp_seconds`. Red as TandemJobStuck.",
            "s",
            query(
                "time() - tandem_job_last_progress_timestamp_seconds{@pod}",
                "{{run}}",
                kind="instant",
            ),
            none="no job",
            limits=[(RED, LIMITS["TandemJobStuck"])],
        ),
        stat(
            "Not finite",
            "Optimizer steps not applied because a loss or gradient was not finite: "
            "`tandem_job_attempts_failed_total`.",
            "short",
            query(
                'sum(increase(tandem_job_attempts_failed_total{@pod,error="non_finite"}'
                "[$__range]))",
                "steps",
                kind="instant",
            ),
            limits=[(RED, 1)],
            none="0",
        ),
        timeseries(
            "Step duration",
            f"Forward, backward and optimizer on the slowest rank, over 5 minutes: `{PER_STEP}`.",
            "s",
            query(
                f"histogram_quantile(0.5, sum by (le) (rate({PER_STEP}_bucket{{@pod}}[5m])))", "p50"
            ),
            query(
                f"histogram_quantile(0.95, sum by (le) (rate({PER_STEP}_bucket{{@pod}}[5m])))",
                "p95",
            ),
            query(
                f"sum(rate({PER_STEP}_sum{{@pod}}[5m])) / sum(rate({PER_STEP}_count{{@pod}}[5m]))",
                "mean",
            ),
            none="no step",
            defaults={"min": 0},
        ),
        timeseries(
            "Where the time goes",
            f"Seconds of each phase per second, over 5 minutes: `{PER_PHASE}`. The rest "
            "up to 1 is time without a job: the trainer waits for samples.",
            "percentunit",
            query(f"sum by (phase) (rate({PER_PHASE}_sum{{@pod}}[5m]))", "{{phase}}"),
            stack="normal",
            none="no job yet",
            defaults={"min": 0, "max": 1},
        ),
        timeseries(
            "Seconds of a phase",
            f"Mean over 15 minutes: `{PER_PHASE}`.",
            "s",
            query(
                f"sum by (phase) (rate({PER_PHASE}_sum{{@pod}}[15m])) / "
                f"sum by (phase) (rate({PER_PHASE}_count{{@pod}}[15m]))",
                "{{phase}}",
            ),
            none="no job yet",
            defaults={"min": 0},
        ),
        timeseries(
            "Tokens per second",
            "In rows, shared prefixes once, and those with a loss, over 5 minutes: "
            "`tandem_train_tokens_total`, `tandem_train_trainable_tokens_total`.",
            "short",
            query("sum by (pod) (rate(tandem_train_tokens_total{@pod}[5m]))", "{{pod}} in rows"),
            query(
                "sum by (pod) (rate(tandem_train_trainable_tokens_total{@pod}[5m]))",
                "{{pod}} with a loss",
            ),
            width=12,
            defaults={"min": 0},
        ),
        timeseries(
            "Samples per second",
            "Trajectories or examples trained on, over 5 minutes: `tandem_train_samples_total`.",
            "short",
            query("sum by (pod) (rate(tandem_train_samples_total{@pod}[5m]))", "{{pod}}"),
            width=12,
            defaults={"min": 0},
        ),
    ]


def _learning() -> list[Json]:
    return [
        row("Learning"),
        timeseries(
            "Reward",
            "Mean, and one standard deviation around it: `tandem_train_reward_mean`, "
            "`tandem_train_reward_std`.",
            "short",
            query("tandem_train_reward_mean{@pod}", "mean"),
            query("tandem_train_reward_mean{@pod} + tandem_train_reward_std{@pod}", "+ std"),
            query("tandem_train_reward_mean{@pod} - tandem_train_reward_std{@pod}", "- std"),
            width=12,
            none="no RL job yet",
        ),
        of_last_step("Loss", "loss", "The loss."),
        of_last_step("Gradient norm", "grad_norm", "Before clipping."),
        timeseries(
            "KL",
            "To the reference (`tandem_train_kl`, where measured) and of the sampler to the trainer"
            " (`tandem_train_kl_sampler`).",
            "short",
            query("tandem_train_kl{@pod}", "to the reference"),
            query("tandem_train_kl_sampler{@pod}", "of the sampler"),
            width=6,
            none="not measured",
        ),
        of_last_step("Entropy", "entropy", "Mean per token, in nats."),
        of_last_step(
            "Clipped",
            "clip_ratio",
            "Share of tokens whose importance ratio was clipped.",
            "percentunit",
            defaults={"min": 0},
        ),
        of_last_step("Largest importance ratio", "importance_ratio_max", "Over all tokens."),
        timeseries(
            "Trainer against sampler",
            "Mean absolute difference of log-probs, in nats: of the tokens of the job's base step"
            " rounding (`tandem_train_logprob_mismatch_fresh`), of those of older steps also what"
            " was trained since (`tandem_train_logprob_mismatch_stale`), and of all"
            " (`tandem_train_logprob_mismatch`).",
            "short",
            query("tandem_train_logprob_mismatch_fresh{@pod}", "of the base step"),
            query("tandem_train_logprob_mismatch_stale{@pod}", "of older steps"),
            query("tandem_train_logprob_mismatch{@pod}", "of all"),
            width=6,
            none="no RL job yet",
            defaults={"min": 0},
        ),
        of_last_step("Learning rate", "learning_rate", "As set by the job.", "sci"),
        of_last_step(
            "Age of the data",
            "off_policy_steps",
            "By how many steps the oldest turn is older than the job's base step.",
            defaults={"min": 0},
            none="no RL job yet",
        ),
        timeseries(
            "Held-out loss",
            "After the last job with held-out examples: `tandem_train_held_out_loss`.",
            "short",
            query("tandem_train_held_out_loss{@pod}", "{{pod}}"),
            width=6,
            none="nothing held out",
        ),
    ]


def _ranks() -> list[Json]:
    return [
        row("Ranks"),
        timeline(
            "Ranks up",
            "Whether each rank's heartbeat changed within a minute: `tandem_rank_up`. No rank "
            "between two jobs is normal.",
            "none",
            query("tandem_rank_up{@pod}", "{{pod}} {{run}} rank {{rank}}"),
            width=12,
            texts=UP_DOWN,
            none="no job",
        ),
        timeseries(
            "Steps of ranks",
            "Optimizer steps done by each rank: `tandem_train_rank_step`. They advance "
            "together; a rank that stops also stops the others.",
            "short",
            query("tandem_train_rank_step{@pod}", "{{pod}} {{run}} rank {{rank}}"),
            width=12,
            none="no job",
            custom={"lineInterpolation": "stepAfter"},
            defaults={"min": 0},
        ),
    ]


def _checkpoints() -> list[Json]:
    return [
        row("Checkpoints"),
        stat(
            "Age of the newest",
            "`tandem_checkpoint_last_success_timestamp_seconds`.",
            "s",
            query(
                "time() - tandem_checkpoint_last_success_timestamp_seconds{@pod}",
                "age",
                kind="instant",
            ),
            width=6,
            none="none yet",
        ),
        stat(
            "Size of the newest",
            "`tandem_checkpoint_size_bytes`.",
            "bytes",
            query("tandem_checkpoint_size_bytes{@pod}", "size", kind="instant"),
            width=6,
            none="none yet",
        ),
        stat(
            "Duration of the newest",
            "To make, hash and commit: `tandem_checkpoint_duration_seconds`.",
            "s",
            query("tandem_checkpoint_duration_seconds{@pod}", "time", kind="instant"),
            width=6,
            none="none yet",
        ),
        stat(
            "Failures",
            "Attempts that failed because a checkpoint could not be read or made: "
            "`tandem_job_attempts_failed_total`.",
            "short",
            query(
                "sum(increase(tandem_job_attempts_failed_total"
                '{@pod,error=~"no_checkpoint|checkpoint_damaged|spool_unusable"}[$__range]))',
                "failures",
                kind="instant",
            ),
            width=6,
            limits=[(RED, 1)],
            none="0",
        ),
    ]
