"""`ImageSettings`: what preprocessor_config.json or processor_config.json says about images."""

from dataclasses import dataclass
from pathlib import Path

from auraflux.errors import FormatError
from auraflux.weights.fields import Fields
from auraflux.weights.formats.untrusted import integer, list_of, named, number, read_json

PIXELS = integer(1, 1 << 32)
CHANNELS = list_of(number(-10, 10), 3)
FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class ImageSettings:
    """The settings of a model's image processor; families have defaults for missing ones."""

    fields: Fields

    @classmethod
    def read(cls, folder: Path) -> "ImageSettings":
        """Read the settings beside a model's weights; empty if there are none."""
        for name in FILES:
            if folder.is_dir() and (folder / name).is_file():
                found = Fields(folder / name, read_json(folder / name, folder))
                return cls(found.section("image_processor") if "image_processor" in found else found)
        return cls(Fields(folder / FILES[0], {}))

    def pixels(self, least: int, most: int) -> tuple[int, int]:
        """Return the fewest and the most pixels of a resized image."""
        size = self.fields.section("size")
        least = self.fields.get("min_pixels", PIXELS, None) or size.get("shortest_edge", PIXELS, least)
        most = self.fields.get("max_pixels", PIXELS, None) or size.get("longest_edge", PIXELS, most)
        if least > most:
            raise FormatError(f"{named(self.fields.where)} has {least} min_pixels and {most} max_pixels.")
        return least, most

    def mean(self, default: tuple[float, ...]) -> tuple[float, ...]:
        """Return the mean of each channel."""
        return self._channels("image_mean", default)

    def std(self, default: tuple[float, ...]) -> tuple[float, ...]:
        """Return the standard deviation of each channel."""
        found = self._channels("image_std", default)
        if min(found) <= 0:
            raise FormatError(f"{named(self.fields.where)} has image_std {list(found)}; positive numbers are needed.")
        return found

    def _channels(self, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        found = tuple(float(each) for each in self.fields.get(key, CHANNELS, list(default)))
        if len(found) != 3:
            raise FormatError(f"{named(self.fields.where)} has {len(found)} {key}; images have 3 channels.")
        return found
