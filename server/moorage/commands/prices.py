"""`moored prices`."""

from typing import Annotated

import typer

from moorage.commands.errors import fail, fail_on, load_config, refuse_root
from moorage.commands.options import DataOption, FileOption
from moorage.extras import install_command


def prices(
    region: Annotated[str, typer.Option(help="Region of AWS.")] = "us-east-1",
    data: DataOption = None,
    config: FileOption = None,
) -> None:
    """Fetch a region's instance types and their prices from AWS, for the backend aws.

    A running daemon uses them at once. Needs the extra aws, and credentials for
    ec2:DescribeInstanceTypes and pricing:GetProducts.
    """
    settings = load_config({"data_dir": data}, config)
    refuse_root(settings.data_dir)
    try:
        from moorage.backends.aws.calls import AwsCalls  # noqa: PLC0415  # The module needs an extra.
        from moorage.backends.aws.catalogue import refresh  # noqa: PLC0415  # As above.
    except ModuleNotFoundError as error:
        fail(f"prices needs {error.name}: {install_command('aws')}")
    from moorage.resources import BackendError  # noqa: PLC0415  # As in serve.

    with fail_on(BackendError, OSError):
        made = refresh(AwsCalls(), settings.data_dir / "aws", region)
    priced = sum(each.usd_per_hour is not None for each in made.types)
    typer.echo(
        f"{len(made.types)} instance types of {region}, {priced} with prices of {made.as_of}"
    )
