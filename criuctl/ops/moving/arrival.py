"""The tree that is to move here, with what this host's restore would see and plan for it.

The needs come from another host and are not trusted; `needs_format.read` has validated them. Facts
and plan are made once, at their first use, by the restore's own code on a manifest that holds what
is known of the tree so far.
"""

from __future__ import annotations

import ipaddress
import time
from functools import cached_property
from typing import cast

from msgspec import Struct, field
from msgspec.structs import replace

from ...checkpoint.connection_record import endpoint
from ...checkpoint.manifest import Manifest
from ...config import Config
from ...connections import rule_parsing
from ...files.judgement import Policy
from ...hooks.contract import RECONNECT
from ...hooks.find import executables
from ...restore.host_facts import HostFacts, PlanOptions
from ...restore.observe import observe
from ...restore.plan import RestorePlan, make_plan
from .needs_format import Needs


class Arrival(Struct, dict=True):
    """The tree that is to move here, and this host."""

    needs: Needs
    config: Config
    clock: float  # the source's, at its request
    now: float = field(default_factory=time.time)  # this host's, when the request arrived

    @property
    def policy(self) -> Policy:
        """The policy for files that already exist here."""
        return cast("Policy", self.needs.file_conflicts or self.config.file_conflicts)

    @cached_property
    def kept(self) -> frozenset[str]:
        """The addresses that move along, as the kernel writes them."""
        return frozenset(
            str(ipaddress.ip_address(text.partition("@")[0])) for text in self.needs.keep_addresses
        )

    @cached_property
    def facts(self) -> HostFacts:
        """This host, as a restore would see it, with the addresses that move along."""
        needs = self.needs
        manifest, options = self.manifest, self.options
        facts = observe(manifest, needs.ids, (), options)
        moved = {c.local for c in needs.connections if endpoint(c.local)[0] in self.kept}
        # `target_files` checks files and folders, depending on what travels; `target_addresses`
        # checks the addresses of listeners.
        found = replace(facts, local_addresses=facts.local_addresses | moved)
        return replace(found, missing_folders=frozenset(), missing_addresses=frozenset())

    @cached_property
    def manifest(self) -> Manifest:
        """The checkpoint's future manifest, as far as a plan reads it; without files, which are
        judged here.
        """
        needs = self.needs
        return Manifest(
            id="0" * 32,
            session=needs.session,
            incarnation=needs.incarnation,
            host=needs.host,
            processes=needs.processes,
            namespaces=needs.namespaces,
            connections=needs.connections,
        )

    @cached_property
    def options(self) -> PlanOptions:
        """The options of the plan, as a restore makes them."""
        return PlanOptions(
            self.needs.pids,
            False,
            self.needs.connections_wish or None,
            self.policy,
            rule_parsing.parse(self.config),
            None,
            frozenset(hook.name for hook in executables(self.config, RECONNECT)),
        )

    @cached_property
    def plan(self) -> RestorePlan:
        """The plan of the restore."""
        return make_plan(self.manifest, self.facts, self.options)
