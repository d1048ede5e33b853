// As much of msgpack as the messages of nccl_quiesce/wire.py need.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

namespace moorage::msgpack {

struct Malformed : std::runtime_error {
  Malformed() : std::runtime_error("a message that is not understood") {}
};

class Writer {
 public:
  Writer& array(std::size_t count) { return head(count, 0x90, 15, 0xDC, 0xDD); }
  Writer& text(std::string_view value) {
    if (value.size() < 32) {
      byte(0xA0U | value.size());
    } else {
      length(value.size(), 0xD9, 0xDA, 0xDB);
    }
    out_.append(value);
    return *this;
  }
  Writer& bytes(std::string_view value) {
    length(value.size(), 0xC4, 0xC5, 0xC6);
    out_.append(value);
    return *this;
  }
  Writer& boolean(bool value) {
    byte(value ? 0xC3U : 0xC2U);
    return *this;
  }
  Writer& number(std::uint64_t value) {
    if (value < 128) {
      byte(value);
    } else {
      byte(0xCF);
      big(value, 8);
    }
    return *this;
  }
  Writer& integer(std::int64_t value) {
    if (value >= 0) return number(static_cast<std::uint64_t>(value));
    byte(0xD3);
    big(static_cast<std::uint64_t>(value), 8);
    return *this;
  }
  std::string take() { return std::move(out_); }

 private:
  void byte(std::uint64_t value) { out_.push_back(static_cast<char>(value)); }
  void big(std::uint64_t value, unsigned width) {
    while (width-- > 0) byte(value >> (8U * width) & 0xFFU);
  }
  void length(std::size_t size, unsigned one, unsigned two, unsigned four) {
    if (size < 256) {
      byte(one);
      big(size, 1);
    } else if (size < 65536) {
      byte(two);
      big(size, 2);
    } else {
      byte(four);
      big(size, 4);
    }
  }
  Writer& head(std::size_t count, unsigned small, unsigned most, unsigned two, unsigned four) {
    if (count <= most) {
      byte(small | count);
    } else if (count < 65536) {
      byte(two);
      big(count, 2);
    } else {
      byte(four);
      big(count, 4);
    }
    return *this;
  }

  std::string out_;
};

// Throws Malformed.
class Reader {
 public:
  explicit Reader(std::string_view data) : data_(data) {}

  std::size_t array() {
    const unsigned first = byte();
    if ((first & 0xF0U) == 0x90U) return first & 0x0FU;
    if (first == 0xDC) return big(2);
    if (first == 0xDD) return big(4);
    throw Malformed();
  }
  std::string_view text() {
    const unsigned first = byte();
    if ((first & 0xE0U) == 0xA0U) return take(first & 0x1FU);
    if (first == 0xD9 || first == 0xC4) return take(big(1));
    if (first == 0xDA || first == 0xC5) return take(big(2));
    if (first == 0xDB || first == 0xC6) return take(big(4));
    throw Malformed();
  }
  bool boolean() {
    const unsigned first = byte();
    if (first != 0xC2 && first != 0xC3) throw Malformed();
    return first == 0xC3;
  }
  std::int64_t integer() {
    const unsigned first = byte();
    if (first < 0x80) return first;
    if (first >= 0xE0) return static_cast<std::int8_t>(first);
    switch (first) {
      case 0xCC: return static_cast<std::int64_t>(big(1));
      case 0xCD: return static_cast<std::int64_t>(big(2));
      case 0xCE: return static_cast<std::int64_t>(big(4));
      case 0xCF: return static_cast<std::int64_t>(big(8));
      case 0xD0: return static_cast<std::int8_t>(big(1));
      case 0xD1: return static_cast<std::int16_t>(big(2));
      case 0xD2: return static_cast<std::int32_t>(big(4));
      case 0xD3: return static_cast<std::int64_t>(big(8));
      default: throw Malformed();
    }
  }
  std::uint64_t number() { return static_cast<std::uint64_t>(integer()); }
  // Seconds; msgspec writes a float always as a double, and an int that was given for one as an int.
  double real() {
    if (!data_.empty() && static_cast<unsigned char>(data_.front()) != 0xCB) return static_cast<double>(integer());
    byte();
    const std::uint64_t bits = big(8);
    double value = 0;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

 private:
  unsigned byte() { return static_cast<unsigned char>(take(1).front()); }
  std::string_view take(std::size_t count) {
    if (count > data_.size()) throw Malformed();
    const std::string_view found = data_.substr(0, count);
    data_.remove_prefix(count);
    return found;
  }
  std::uint64_t big(unsigned width) {
    std::uint64_t value = 0;
    for (const char part : take(width)) value = value << 8U | static_cast<unsigned char>(part);
    return value;
  }

  std::string_view data_;
};

}  // namespace moorage::msgpack
