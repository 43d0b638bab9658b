"""Calls to AWS: clients, and plain sentences for their errors.

boto3 finds the credentials itself (environment, profile, role of the machine), as well as the
region and, for private endpoints, `AWS_ENDPOINT_URL`. This module never sees credentials.
"""

import threading
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Final, TypeAlias

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004  # botocore's base class of network errors.
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.parsers import ResponseParserError

from moorage.backends.base import BackendError
from moorage.records.json_values import JsonObject, JsonValue

Client: TypeAlias = Any
"""A client of boto3; its class is created at run time."""
CONNECT_SECONDS_MAX: Final = 5.0
READ_SECONDS_MAX: Final = 20.0
"""Longest time in seconds of one try of a call; `RunInstances` usually answers within a few."""
TRIES_MAX: Final = 4
"""Maximum tries of a call other than a launch; boto3 pauses between them, longer each time."""
PRICING_REGION: Final = "us-east-1"
"""The AWS region whose endpoint serves the price list of all regions."""


class Meaning(StrEnum):
    """The meaning of a failed launch for the next try."""

    NO_CAPACITY = "no_capacity"
    """This zone lacks capacity now: the next zone may have capacity."""
    QUOTA = "quota"
    """The account's quota is used up here: another market or type may succeed."""
    AGAIN = "again"
    """The same call may succeed soon: AWS throttled it, failed, or was unreachable."""
    NEVER = "never"
    """The call is wrong or not allowed: it fails everywhere."""


_THROTTLED: Final = frozenset(
    {"RequestLimitExceeded", "Throttling", "ThrottlingException", "RequestThrottled"}
)
_MEANINGS: Final = {
    # https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
    **dict.fromkeys(
        (
            "InsufficientInstanceCapacity",
            "InsufficientHostCapacity",
            "InsufficientReservedInstanceCapacity",
            "InsufficientCapacity",
            "InsufficientFreeAddressesInSubnet",
            "SpotMaxPriceTooLow",
            "Unsupported",  # This zone does not offer the type.
            "MissingInput",  # This zone has no default subnet.
        ),
        Meaning.NO_CAPACITY,
    ),
    **dict.fromkeys(
        ("VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded"),
        Meaning.QUOTA,
    ),
    **dict.fromkeys(
        (
            *_THROTTLED,
            *("Unavailable", "ServiceUnavailable"),
            *("InternalError", "InternalFailure", "InternalServerError"),
        ),
        Meaning.AGAIN,
    ),
}
_DENIED: Final = frozenset(
    {
        *("AuthFailure", "UnauthorizedOperation", "OptInRequired", "AccessDeniedException"),
        *("InvalidClientTokenId", "UnrecognizedClientException", "ExpiredToken"),
        *("RequestExpired", "SignatureDoesNotMatch", "AccessDenied"),
    }
)
_TROUBLE_FROM: Final = 500
"""From this HTTP status on, an error without an AWS code counts as temporary."""
_ERRORS: Final = (ClientError, BotoCoreError, ResponseParserError, ValueError)
"""All errors that a call of boto3 raises."""


class AwsError(BackendError):
    """AWS refused a call.

    Args:
        text: A sentence for a person: the error, the place, the remedy.
    """

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def meaning(self) -> Meaning:
        """The meaning of the error for a further attempt."""
        return _MEANINGS.get(self.code, Meaning.NEVER)


class UnreachableError(AwsError):
    """AWS did not answer; AWS may have carried out the call."""

    @property
    def meaning(self) -> Meaning:
        """`AGAIN`: a repeated call may succeed."""
        return Meaning.AGAIN


class AwsCalls:
    """Makes the calls of one backend. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._session: boto3.session.Session | None = None
        self._clients: dict[tuple[str, str, int], Client] = {}

    @property
    def region(self) -> str | None:
        """The region that boto3 is configured for, or None.

        Raises:
            AwsError: The configuration of AWS on this machine cannot be read.
        """
        try:
            with self._lock:
                name: str | None = self._open().region_name
        except BotoCoreError as error:
            raise AwsError(
                f"the AWS configuration here is wrong: {error}", "Configuration"
            ) from error
        return name

    def call(self, name: str, region: str, **arguments: JsonValue) -> JsonObject:
        """Make one call of EC2; boto3 repeats it if the error may pass.

        Raises:
            AwsError: AWS refused the call.
            UnreachableError: AWS did not answer.
        """
        return self._call(name, region, TRIES_MAX, arguments)

    def launch(self, region: str, **arguments: JsonValue) -> JsonObject:
        """Call RunInstances once, not repeated by boto3.

        AWS reports a lack of capacity as HTTP 500, after which boto3 would repeat the call.
        """
        return self._call("run_instances", region, 1, arguments)

    def manage(self, name: str, region: str, **arguments: JsonValue) -> JsonObject:
        """Make one call of Systems Manager, which runs commands on instances.

        Raises:
            AwsError: AWS refused the call.
            UnreachableError: AWS did not answer.
        """
        return self._call(name, region, TRIES_MAX, arguments, "ssm")

    def pages(
        self, name: str, region: str, service: str = "ec2", **arguments: JsonValue
    ) -> Iterator[JsonObject]:
        """Yield the pages of an answer of AWS."""
        try:
            yield from (
                self._client(service, region, TRIES_MAX).get_paginator(name).paginate(**arguments)
            )
        except _ERRORS as error:
            raise _error_of(error, name, region) from error

    def _call(
        self, name: str, region: str, tries: int, arguments: JsonObject, service: str = "ec2"
    ) -> JsonObject:
        try:
            client = self._client(service, region, tries)
            answer: JsonObject = getattr(client, name)(**arguments)
        except _ERRORS as error:
            raise _error_of(error, name, region) from error
        return answer

    def _client(self, service: str, region: str, tries: int) -> Client:
        """Return a client. Threads may share clients, but may not create them at the same time."""
        key = (service, region, tries)
        with self._lock:
            if key not in self._clients:
                config = Config(
                    connect_timeout=CONNECT_SECONDS_MAX,
                    read_timeout=READ_SECONDS_MAX,
                    retries={"mode": "standard", "total_max_attempts": tries},
                    max_pool_connections=32,
                    user_agent_extra="moorage",
                )
                make: Any = self._open().client  # boto3's types accept only literal names.
                self._clients[key] = make(service, region_name=region, config=config)
            return self._clients[key]

    def _open(self) -> boto3.session.Session:
        if self._session is None:
            self._session = boto3.session.Session()
        return self._session


def _error_of(error: Exception, name: str, region: str) -> AwsError:
    """Return a sentence with the error, its place and the remedy."""
    call = "".join(part.capitalize() for part in name.split("_"))
    if isinstance(error, ClientError):
        code = str(error.response.get("Error", {}).get("Code", "Unknown"))
        message = str(error.response.get("Error", {}).get("Message", "")).rstrip(".")
        detail = f"{code}: {message}" if message else code
        if code.isdigit() and int(code) >= _TROUBLE_FROM:  # From a proxy, not from AWS.
            return UnreachableError(f"AWS did not answer {call} in {region}: HTTP {detail}", code)
        if code in _THROTTLED:
            advice = "send fewer requests, or have AWS raise the limit of API requests"
            return AwsError(f"AWS throttles {call} in {region} ({detail}): {advice}", code)
        if code in _DENIED:
            advice = "check the credentials and their permissions"
            return AwsError(f"AWS does not allow {call} in {region} ({detail}): {advice}", code)
        return AwsError(f"AWS refused {call} in {region} ({detail})", code)
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        advice = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role"
        return AwsError(f"there are no credentials for AWS ({error}): {advice}", "NoCredentials")
    # An answer that cannot be parsed comes from a proxy on the way, not from AWS.
    if isinstance(error, ConnectionError | HTTPClientError | ResponseParserError):
        text = f"AWS did not answer {call} in {region}: {error}"
        return UnreachableError(text, "Unreachable")
    return AwsError(f"{call} could not be sent to AWS in {region}: {error}", type(error).__name__)
