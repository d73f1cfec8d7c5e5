#include "guard_texts.h"

#include <algorithm>
#include <map>

#include "closing_program.h"

namespace tureen::guard {

namespace {

constexpr int MAX_NESTED = 1000;
constexpr size_t MOST_EXPONENT_DIGITS = 4;  // of a number that is being written
constexpr const char* ZERO = "#0";

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_in_number(char c) { return is_digit(c) || c == '.' || c == 'e' || c == 'E' || c == '+' || c == '-'; }
bool is_letter(char c) { return c >= 'a' && c <= 'z'; }

size_t digits_from(std::string_view text, size_t at) {
    while (at < text.size() && is_digit(text[at])) at++;
    return at;
}

// The value of the number that a text begins with, as its digits and the power of ten of the last one; empty where it
// begins with none.
std::string number_of(std::string_view text, size_t most_exponent_digits) {
    const bool is_negative = !text.empty() && text[0] == '-';
    size_t at = digits_from(text, is_negative);
    if (at == size_t(is_negative)) return "";
    std::string digits(text.substr(is_negative, at - is_negative));
    int64_t exponent = 0;
    if (at + 1 < text.size() && text[at] == '.' && is_digit(text[at + 1])) {
        const size_t end = digits_from(text, at + 1);
        digits += text.substr(at + 1, end - at - 1);
        exponent = -int64_t(end - at - 1);
        at = end;
    }
    if (at + 1 < text.size() && (text[at] == 'e' || text[at] == 'E')) {
        const bool has_sign = text[at + 1] == '+' || text[at + 1] == '-';
        const size_t first = at + 1 + has_sign, end = std::min(digits_from(text, first), first + most_exponent_digits);
        int64_t value = 0;
        for (size_t digit = first; digit < end && value < int64_t(1) << 50; digit++) {
            value = value * 10 + (text[digit] - '0');
        }
        exponent += has_sign && text[at + 1] == '-' ? -value : value;
    }
    const size_t first = digits.find_first_not_of('0');
    if (first == std::string::npos) return ZERO;
    const size_t last = digits.find_last_not_of('0');
    exponent += int64_t(digits.size() - 1 - last);
    return (is_negative ? "#-" : "#") + digits.substr(first, last - first + 1) + "e" + std::to_string(exponent);
}

void put_point(std::string& text, uint32_t point) {
    if (point < 0x80) {
        text += char(point);
        return;
    }
    if (point < 0x800) {
        text += char(0xc0 | point >> 6);
    } else {
        if (point < 0x10000) {
            text += char(0xe0 | point >> 12);
        } else {
            text += char(0xf0 | point >> 18);
            text += char(0x80 | (point >> 12 & 0x3f));
        }
        text += char(0x80 | (point >> 6 & 0x3f));
    }
    text += char(0x80 | (point & 0x3f));
}

// The four digits after a "\u"; -1 where they are not there.
int32_t unit_at(std::string_view text, size_t at) {
    if (at + 6 > text.size() || text[at] != '\\' || text[at + 1] != 'u') return -1;
    int32_t unit = 0;
    for (char c : text.substr(at + 2, 4)) {
        const int32_t low = c | 0x20;
        if (!is_digit(c) && (low < 'a' || low > 'f')) return -1;
        unit = unit * 16 + (is_digit(c) ? c - '0' : low - 'a' + 10);
    }
    return unit;
}

// Where a string ends that begins at a place: after its quote, or where the text ends.
size_t string_end(std::string_view text, size_t at) {
    for (at++; at < text.size(); at++) {
        if (text[at] == '"') return at + 1;
        if (text[at] != '\\') continue;
        if (at + 1 == text.size()) return at;
        at++;
    }
    return at;
}

// The next part at or after a place; empty at the end.
Part part_from(std::string_view text, size_t at) {
    for (; at < text.size(); at++) {
        const char c = text[at];
        size_t end = at;
        if (c == '"') {
            end = string_end(text, at);
        } else if (is_digit(c) || (c == '-' && at + 1 < text.size() && is_digit(text[at + 1]))) {
            while (end < text.size() && is_in_number(text[end])) end++;
            return {uint32_t(at), uint32_t(end), number_of(text.substr(at, end - at), MOST_EXPONENT_DIGITS)};
        } else if (is_letter(c)) {
            while (end < text.size() && is_letter(text[end])) end++;
        } else if (c == '-' || c == '[' || c == ']' || c == '{' || c == '}' || c == ',' || c == ':') {
            end++;
        }
        if (end > at) return {uint32_t(at), uint32_t(end), ""};
    }
    return {uint32_t(at), uint32_t(at), ""};
}

std::string_view spelled(std::string_view text, const Part& part) {
    return text.substr(part.begin, part.end - part.begin);
}

bool are_equal(std::string_view text, const Part& part, std::string_view other_text, const Part& other) {
    if (part.number.empty() != other.number.empty()) return false;
    return part.number.empty() ? spelled(text, part) == spelled(other_text, other) : part.number == other.number;
}

// Writes a value so that equal ones are written alike.
class Values {
public:
    explicit Values(std::string_view text) : text_(text) { next(); }

    std::string value(int depth = 0) {
        if (depth > MAX_NESTED) throw TooLarge("a value that must be different is nested too deep");
        const std::string_view here = spelled(text_, part_);
        const char first = here.empty() ? ' ' : here[0];
        if (first == '[') return array(depth);
        if (first == '{') return object(depth);
        std::string written;
        if (first == '"') {
            const std::string inner = said(here);
            written = "\"" + std::to_string(inner.size()) + ":" + inner;
        } else {
            written = part_.number.empty() ? std::string(here) : number_of(here, here.size());
        }
        next();
        return written;
    }

private:
    void next() { part_ = part_from(text_, part_.end); }
    bool is_at(char sign) const { return part_.end > part_.begin && text_[part_.begin] == sign; }
    bool is_over() const { return part_.end == part_.begin; }

    std::string array(int depth) {
        std::string written = "[";
        next();
        while (!is_over() && !is_at(']')) {
            written += value(depth + 1) + ",";
            if (is_at(',')) next();
        }
        next();
        return written + "]";
    }

    std::string object(int depth) {
        std::map<std::string, std::string> members;  // of a key that is there twice, the last
        next();
        while (!is_over() && !is_at('}')) {
            std::string key = value(depth + 1);
            if (is_at(':')) next();
            members[std::move(key)] = value(depth + 1);
            if (is_at(',')) next();
        }
        next();
        std::string written = "{";
        for (const auto& [key, member] : members) written += key + ":" + member + ",";
        return written + "}";
    }

    const std::string_view text_;
    Part part_{0, 0, ""};
};

}  // namespace

std::vector<uint32_t> code_points(std::string_view text) {
    std::vector<uint32_t> points;
    for (size_t at = 0; at < text.size();) {
        const uint8_t lead = uint8_t(text[at++]);
        uint32_t point = lead < 0xc0 ? lead : lead < 0xe0 ? lead & 0x1f : lead < 0xf0 ? lead & 0x0f : lead & 0x07;
        const int more = lead < 0xc0 ? 0 : lead < 0xe0 ? 1 : lead < 0xf0 ? 2 : 3;
        for (int byte = 0; byte < more && at < text.size(); byte++) point = point << 6 | (uint8_t(text[at++]) & 0x3f);
        points.push_back(point);
    }
    return points;
}

std::string said(std::string_view text) {
    std::string result;
    const size_t end = text.size() > 1 && text.back() == '"' ? text.size() - 1 : text.size();
    for (size_t at = 1; at < end; at++) {
        if (text[at] != '\\' || at + 1 >= end) {
            result += text[at];
            continue;
        }
        if (int32_t unit = unit_at(text, at); unit >= 0) {
            at += 5;
            const int32_t low = unit >= 0xd800 && unit < 0xdc00 ? unit_at(text, at + 1) : -1;
            if (low >= 0xdc00 && low < 0xe000) {
                unit = 0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00);
                at += 6;
            }
            put_point(result, uint32_t(unit));
            continue;
        }
        const char c = text[++at];
        result += c == 'b' ? '\b' : c == 'f' ? '\f' : c == 'n' ? '\n' : c == 'r' ? '\r' : c == 't' ? '\t' : c;
    }
    return result;
}

std::string comparable(std::string_view text) { return Values(text).value(); }

const std::vector<Part>& Whole::parts() const {
    if (!parts_.empty()) return parts_;
    for (Part part = part_from(text, 0); part.end > part.begin; part = part_from(text, part.end)) {
        parts_.push_back(part);
    }
    return parts_;
}

bool Whole::has_zero() const {
    return std::any_of(parts().begin(), parts().end(), [](const Part& part) { return part.number == ZERO; });
}

bool Becoming::has_part(size_t index) {
    while (parts_.size() <= index) {
        Part part = part_from(text_, read_);
        if (part.end == part.begin) return false;
        read_ = part.end;
        parts_.push_back(std::move(part));
    }
    return true;
}

bool Becoming::can_be(const Whole& other) {
    if (std::string_view(other.text).substr(0, text_.size()) == text_) return true;
    const std::vector<Part>& parts = other.parts();
    for (size_t at = 0; has_part(at); at++) {
        if (at >= parts.size()) return false;
        if (are_equal(text_, parts_[at], other.text, parts[at])) continue;
        const std::string_view begun = spelled(text_, parts_[at]);
        const bool is_begun = spelled(other.text, parts[at]).substr(0, begun.size()) == begun;
        return is_begun && !has_part(at + 1);  // what is before another part is whole
    }
    return true;
}

bool is_zero_for_good(std::string_view text) {
    size_t at = !text.empty() && text[0] == '-';
    if (at >= text.size() || text[at] != '0') return false;
    at++;
    if (at < text.size() && text[at] == '.') {
        for (at++; at < text.size() && text[at] == '0';) at++;
    }
    return at < text.size() && (text[at] == 'e' || text[at] == 'E');
}

}  // namespace tureen::guard
