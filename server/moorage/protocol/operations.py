"""The messages that carry `op`, but for `whatif`, which has a request in it: see `messages`."""

from msgspec import Struct

from moorage import model
from moorage.records import fields as f
from moorage.records.requests import QuotaAmounts, Resources, cluster_ids


class OpMessage(
    Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="op",
):
    """The common fields of all `op` messages. Unknown fields are refused, with `strict` or without.

    To ignore one would do more than its sender means: a drain without its `node` is of all nodes.
    """

    id: f.MessageId = None
    strict: f.Flag = False


class ListingMessage(OpMessage, frozen=True, kw_only=True):
    """One page of a list: `filters` are equalities, `after` is the `next` of the page before.

    A standby answers once it knows of the fact `min_revision`, or says soon that it does not.
    """

    min_revision: f.Revision = 0
    filters: f.Filters = {}
    cluster: f.OptionalName = ""
    after: f.OptionalName = ""
    next: f.OptionalName = ""
    limit: f.PageLimit = 100

    @property
    def cursor(self) -> str:
        """The start of the page; `next` is accepted as another name of `after`."""
        return self.after or self.next

    def equalities(self) -> dict[str, str | int | float | bool]:
        """Return all filters, `cluster` among them where it was given."""
        return {**self.filters, "cluster": self.cluster} if self.cluster else dict(self.filters)


class Release(OpMessage, frozen=True, kw_only=True, tag="release"):
    """End a lease. Without `token`, one of the caller's own tenant.

    With `dry_run`, `reasons` of the reply say which requests then have their turn; leases of
    `beside` are taken to end, too.
    """

    lease: f.Identifier
    token: f.Identifier | None = None
    dry_run: f.Flag = False
    beside: f.Leases = ()


class Renew(OpMessage, frozen=True, kw_only=True, tag="renew"):
    """Let a lease last longer: `ttl_seconds` from now, by default the TTL of its request."""

    lease: f.Identifier
    token: f.Identifier
    ttl_seconds: f.TtlSeconds | None = None


class Flush(OpMessage, frozen=True, kw_only=True, tag="flush"):
    """End your warm leases, in one cluster or everywhere."""

    cluster: f.OptionalName = ""
    dry_run: f.Flag = False


class _Place(OpMessage, frozen=True, kw_only=True):
    """A cluster, or a node of it. With `dry_run`, it is only said what would come of it."""

    cluster: f.Name
    node: f.OptionalName = ""
    dry_run: f.Flag = False


class Cordon(_Place, frozen=True, kw_only=True, tag="cordon"):
    """Place nothing new there."""

    reason: f.OptionalName = ""


class Drain(Cordon, frozen=True, kw_only=True, tag="drain"):
    """Place nothing new there, and end or move what runs there, within `seconds` where given."""

    seconds: f.WaitSeconds | None = None


class Uncordon(_Place, frozen=True, kw_only=True, tag="uncordon"):
    """Place something there again."""


class ForgetMachine(OpMessage, frozen=True, kw_only=True, tag="forget"):
    """Give up a machine whose agent will not come back: its leases fail, and its node goes."""

    cluster: f.Name
    node: f.Name


class ReserveNodes(OpMessage, frozen=True, kw_only=True, tag="reserve"):
    """Keep nodes for a tenant, from one moment to another: such as `resources` fits on."""

    resources: Resources
    starts_at: f.Moment
    ends_at: f.Moment
    tenant: f.OptionalName = ""
    clusters: f.Clusters = None
    lapse_seconds: f.KeepSeconds = 0.0
    dry_run: f.Flag = False

    def candidates(self) -> tuple[model.ClusterId, ...] | None:
        """Return the clusters to choose from, or None for all."""
        return cluster_ids(self.clusters or None)


class UnreserveNodes(OpMessage, frozen=True, kw_only=True, tag="unreserve"):
    """End a reservation before its time."""

    reservation: f.Identifier


class RemoveQuota(OpMessage, frozen=True, kw_only=True, tag="remove_quota"):
    """Remove the quota of a tenant, or of one of its projects: that of all holds then."""

    tenant: f.Name
    project: f.Identifier | None = None


class SetQuota(OpMessage, frozen=True, kw_only=True, tag="set_quota"):
    """Set the quota of a tenant or of one of its projects. A field left out is as at first."""

    tenant: f.Name
    project: f.Identifier | None = None
    weight: f.Weight = 1.0
    nominal: QuotaAmounts = QuotaAmounts()
    borrow: QuotaAmounts = QuotaAmounts()
    lend: QuotaAmounts = QuotaAmounts()
    notice_seconds: f.WaitSeconds = 0.0

    def quota(self) -> model.Quota:
        """Return it as the core knows it."""
        limits = (self.nominal.amounts(), self.borrow.amounts(), self.lend.amounts())
        return model.Quota(self.weight, *limits, self.notice_seconds)


class _Inquiry(OpMessage, frozen=True, kw_only=True):
    """About one lease or one request; the two share their ids."""

    min_revision: f.Revision = 0
    lease: f.OptionalIdentifier = ""
    request: f.OptionalIdentifier = ""

    @property
    def subject(self) -> str:
        """The id of the lease or request."""
        return self.lease or self.request


class Status(_Inquiry, frozen=True, kw_only=True, tag="status"):
    """Return the state of a lease or request."""


class Why(_Inquiry, frozen=True, kw_only=True, tag="why"):
    """The reasons for what became of a lease or request; `nodes`: and what each node lacks now."""

    nodes: f.Flag = False
    after: f.OptionalName = ""
    limit: f.PageLimit = 100


class Cancel(OpMessage, frozen=True, kw_only=True, tag="cancel"):
    """Give up waiting."""

    request: f.Identifier
    dry_run: f.Flag = False


class QueueListing(ListingMessage, frozen=True, kw_only=True, tag="queue"):
    """List waiting requests: the tenant's own; for operators, all."""


class LeaseListing(ListingMessage, frozen=True, kw_only=True, tag="leases"):
    """List leases: the tenant's own; for operators, all. With `sort`, also their total number."""

    state: f.OptionalName = ""
    sort: f.LeaseOrder = ""

    def equalities(self) -> dict[str, str | int | float | bool]:
        """Return all filters, `cluster` and `state` among them where they were given."""
        filters = super().equalities()
        return {**filters, "state": self.state} if self.state else filters


class FleetListing(ListingMessage, frozen=True, kw_only=True, tag="fleet"):
    """List total and free capacity: of all clusters, or of the nodes of `cluster`."""


class QuotaListing(ListingMessage, frozen=True, kw_only=True, tag="quotas"):
    """List the quotas of tenants and projects, and how much each of them holds."""


class ReservationListing(ListingMessage, frozen=True, kw_only=True, tag="reservations"):
    """List reservations and their times: the tenant's own; for operators, all."""


class DecisionListing(ListingMessage, frozen=True, kw_only=True, tag="decisions"):
    """List recent decisions, newest first: the tenant's own; for operators, all."""


class DecisionFleet(OpMessage, frozen=True, kw_only=True, tag="decision_fleet"):
    """The fleet as it was when a request was decided, and the request."""

    request: f.Identifier


class PastFleet(OpMessage, frozen=True, kw_only=True, tag="past_fleet"):
    """The fleet as it was at a time."""

    at: f.Moment


class Manage(OpMessage, frozen=True, kw_only=True, tag="manage"):
    """Call `management` of a policy."""

    policy_rule_uri: f.Uri
    action: f.Name
    data: f.Document = {}  # msgspec copies it.


class Logs(OpMessage, frozen=True, kw_only=True, tag="logs"):
    """Read the output of a lease's workload from a byte offset; a negative one counts from the end.

    Where nothing has been written there yet, the reply waits for it, up to `wait_seconds`. The
    offset counts in what the start number `attempt` wrote, and starts again with the next one; 0
    means the last start. Text that is no UTF-8 comes unaltered as `base64` only. Without `token`,
    the lease is one of the caller's own tenant.
    """

    lease: f.Identifier
    token: f.Identifier | None = None
    offset: f.Offset = 0
    attempt: f.AttemptNumber = 0
    wait_seconds: f.LogWaitSeconds = 0
    encoding: f.Encoding = "text"


class Exec(OpMessage, frozen=True, kw_only=True, tag="exec"):
    """Run a command inside of the workload of a lease; about `token` as `logs`."""

    lease: f.Identifier
    token: f.Identifier | None = None
    command: f.Command
    timeout_seconds: f.ExecSeconds = 60
    workdir: f.OptionalName = ""
    user: f.OptionalName = ""
    environment: f.Variables = {}  # msgspec copies it.


class Files(OpMessage, frozen=True, kw_only=True, tag="files"):
    """List the files that the workload of a lease left in its own folder, or read one of them.

    Without `path` the reply lists them; with it, the reply is a piece of that file from `offset`
    on. `attempt` and `token` are as with `logs`.
    """

    lease: f.Identifier
    token: f.Identifier | None = None
    attempt: f.AttemptNumber = 0
    path: f.RunPath = ""
    offset: f.FileOffset = 0


class WatchTopics(OpMessage, frozen=True, kw_only=True, tag="watch"):
    """Get the news of these topics from now on."""

    topics: f.Topics


class Resume(OpMessage, frozen=True, kw_only=True, tag="resume"):
    """Go on with a session that lost its connection; the first message of a connection."""

    session: f.Identifier
