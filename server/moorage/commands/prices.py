"""`moored prices`."""

from pathlib import Path
from typing import Annotated

import typer

from moorage.commands.errors import load_config
from moorage.extras import install_command


def prices(
    region: Annotated[str, typer.Option(help="Of AWS.")] = "us-east-1",
    data: Annotated[Path | None, typer.Option(help="Data folder, with ledger and catalog.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
) -> None:
    """Fetch a region's instance types and their prices from AWS, for the backend aws.

    A running daemon uses them at once. Needs the extra aws, and credentials for
    ec2:DescribeInstanceTypes and pricing:GetProducts.
    """
    folder = load_config({"data_dir": data}, config).data_dir / "aws"
    try:
        from moorage.backends.aws.calls import AwsCalls  # noqa: PLC0415  # It needs an extra.
        from moorage.backends.aws.catalogue import refresh  # noqa: PLC0415  # As above.
    except ModuleNotFoundError as error:
        typer.echo(f"moored: prices needs {error.name}: {install_command('aws')}", err=True)
        raise typer.Exit(1) from None
    from moorage.resources import BackendError  # noqa: PLC0415  # As in serve.

    try:
        made = refresh(AwsCalls(), folder, region)
    except (BackendError, OSError) as error:
        typer.echo(f"moored: {error}", err=True)
        raise typer.Exit(1) from None
    priced = sum(each.usd_per_hour is not None for each in made.types)
    typer.echo(
        f"{len(made.types)} instance types of {region}, {priced} with prices of {made.as_of}"
    )
