"""Flags that several services have: each is defined here once, as a type."""

from typing import Annotated

from pydantic import Field

from services.common.flags import Int

PipelineSize = Annotated[Int, Field(ge=1, le=64, description="pipeline stages of a replica")]
