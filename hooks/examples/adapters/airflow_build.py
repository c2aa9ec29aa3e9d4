"""Airflow: a DAG that runs a command as a session; put it into the folder of DAGs.

    pip install '/path/to/clone/of/criuctl[airflow]'

Kill a worker or the triggerer at any moment: the command runs on, and the task gets its exit code.
"""

from __future__ import annotations

from airflow.sdk import DAG

from criuctl.adapters.airflow import SessionOperator

with DAG("build", params={"command": ["make", "all"]}, render_template_as_native_obj=True):
    SessionOperator(task_id="build", argv="{{ params.command }}", cwd="/srv/build")
