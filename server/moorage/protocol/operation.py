"""What `op` messages share. `messages` has each of them."""

from msgspec import Struct

from moorage.protocol import fields as f


class OpMessage(
    Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="op",
):
    """What all `op` messages share."""

    id: f.MessageId = None


class ListingMessage(OpMessage, frozen=True, kw_only=True):
    """One page of a list: `filters` are equalities, `after` is the `next` of the page before."""

    filters: f.Filters = {}
    cluster: f.OptionalName = ""
    after: f.OptionalName = ""
    next: f.OptionalName = ""
    limit: f.PageLimit = 100

    @property
    def cursor(self) -> str:
        """Where the page starts; `next` is accepted as another name of `after`."""
        return self.after or self.next

    def equalities(self) -> dict[str, str | int | float | bool]:
        """Return all filters, `cluster` among them where it was given."""
        return {**self.filters, "cluster": self.cluster} if self.cluster else dict(self.filters)
