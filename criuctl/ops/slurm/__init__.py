"""Jobs of Slurm that survive preemption: a service of root's on each node, and what a job runs.

`runner` is unprivileged and is what ``criuctl slurm run`` does in a job. It speaks (`protocol`) to
the node's service (`service`), which forks a `worker` for each job. Who asks, and for which job,
the service finds out by itself (`jobs`); what it does for a job is in `checkpoints`.
"""
