"""`midstream lora`: load, unload and list adapters."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from rich.console import Console
from rich.table import Table

from midstream.cli.connect import add_connection, open_client
from midstream.client.info import LoraInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    load = actions.add_parser("load", help="load an adapter from a PEFT folder that every worker can read")
    load.add_argument("name", help="Name of the adapter in requests.")
    load.add_argument("path", help="PEFT folder with adapter_config.json and adapter_model.safetensors.")
    unload = actions.add_parser("unload", help="unload an adapter; new requests can no longer use it")
    unload.add_argument("name")
    shown = actions.add_parser("list", help="list loaded adapters")
    for action in (load, unload, shown):
        add_connection(action)


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "load":
        arguments.path = str(Path(arguments.path).absolute())
    asyncio.run(_run(arguments))
    return 0


async def _run(arguments: argparse.Namespace) -> None:
    console = Console(highlight=False, markup=False)
    async with open_client(arguments) as client:
        if arguments.action == "load":
            info = await client.load_lora(arguments.name, arguments.path)
            console.print(f"loaded {info.name}: {_kind(info)}")
        elif arguments.action == "unload":
            await client.unload_lora(arguments.name)
            console.print(f"unloaded {arguments.name}")
        else:
            table = Table(box=None)
            for heading in ("name", "kind", "MB", "path"):
                table.add_column(heading)
            for info in await client.loras():
                table.add_row(info.name, _kind(info), f"{info.num_bytes / 1e6:.1f}", info.path)
            console.print(table)


def _kind(info: LoraInfo) -> str:
    return f"{info.num_virtual_tokens} virtual tokens" if info.num_virtual_tokens else f"LoRA of rank {info.rank}"
